"""Tensors that the output of a small model is computed from, and the shares of their tokens, which its weights determine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from visattn.core.capturing.following.conclusions import Conclusions, concluded
from visattn.core.capturing.following.cut import Cut, Part, _holds
from visattn.core.capturing.following.tape_readouts import _are_parallel, _is_same, _plain, _probes
from visattn.core.capturing.tokens.arrangement import Tokens
from visattn.core.capturing.trace.tape import TAPES, Tape
from visattn.core.geometry import Box
from visattn.core.records import TokenLayout

WIDTH, CLASSES = 4, 3
BOX = Box(0.0, 0.0, 8.0, 12.0)
GRID = TokenLayout("tokens", (), (2, 3), BOX)
WITH_CLS = TokenLayout("tokens", ("cls",), (2, 3), BOX)
Finish = Callable[["Model", Tensor], Any]


class Model(nn.Module):
    """Two by three patches that attend to each other without heads; `finish` computes the output from the result."""

    def __init__(self, finish: Finish, *, with_class: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.finish, self.with_class = nn.Conv2d(3, WIDTH, 4, 4), finish, with_class
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.head = nn.Parameter(torch.randn(WIDTH, CLASSES))
        self.parts = nn.Parameter(torch.tensor([3.0, -1.0, 0.0, 2.0, 4.0, -6.0]))
        self.register_buffer("single", torch.ones(WIDTH, dtype=torch.float64))
        self.query = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Any:
        """Attend once."""
        tokens = self.embed(x).flatten(2).mT
        if self.with_class:
            tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1)
        return self.finish(self, F.scaled_dot_product_attention(tokens, tokens, tokens))


def conclusions(model: nn.Module) -> tuple[Tape, Conclusions]:
    with torch.no_grad(), visattn.capture(model.eval()):
        model(torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0)))
    tape = TAPES.of(model)[0]
    return tape, concluded(tape)


def shares(finish: Finish, *, with_class: bool = False) -> list[list[float]] | None:
    """Return the shares of tokens in the output, which are the same for both images."""
    _, found = conclusions(Model(finish, with_class=with_class))
    assert found.readouts is not None
    taken = found.readouts.shares()
    if taken is None:
        return None
    assert all(torch.allclose(part[0], part[1], atol=1e-5) for part in taken)
    return [[round(float(share), 4) for share in part[0]] for part in taken]


WEIGHTED = [0.1875, 0.0625, 0.0, 0.125, 0.25, 0.375]  # of 16
ALIKE = [round(1 / 6, 4)] * 6


def weighted(model: Model, x: Tensor) -> Tensor:
    return (x * model.parts[:, None]).sum(1)


FINISHES: dict[str, tuple[Finish, list[float] | None]] = {
    "mean": (lambda model, x: x.mean(1), ALIKE),
    "linear": (lambda model, x: x.mean(1) @ model.head, ALIKE),
    "weights": (weighted, WEIGHTED),
    "weights and head": (lambda model, x: weighted(model, x) @ model.head, WEIGHTED),
    "head from parameters": (lambda model, x: weighted(model, x) @ (model.head * 2), WEIGHTED),
    "head from nothing": (lambda model, x: weighted(model, x) @ torch.ones(WIDTH, CLASSES), WEIGHTED),
    "head from chance": (lambda model, x: weighted(model, x) @ torch.randn(WIDTH, CLASSES), None),
    "head overwritten": (lambda model, x: weighted(model, x) @ torch.zeros(WIDTH, CLASSES).add_(model.head), None),
    "activation behind one vector": (lambda model, x: weighted(model, x).relu() @ model.head, WEIGHTED),
    "activation behind several": (
        lambda model, x: (model.parts.view(2, 3) @ x.view(2, 3, 2, -1).flatten(2)).relu().sum((1, 2)),
        None,
    ),
    "zeros before training": (lambda model, x: weighted(model, x) @ model.get_parameter("head").detach().mul(0), None),
    "double precision": (lambda model, x: weighted(model, x) * model.get_buffer("single").float(), WEIGHTED),
    "sum of branches": (lambda model, x: weighted(model, x) + weighted(model, x), WEIGHTED),
    "first": (lambda model, x: x[:, 0] @ model.head, [1, 0, 0, 0, 0, 0]),
    "last": (lambda model, x: x[:, -1], [0, 0, 0, 0, 0, 1]),
    "two outputs": (lambda model, x: (x[:, 1], x[:, 3] * 2), None),
}


@pytest.mark.parametrize("name", [name for name in FINISHES if name not in ("two outputs", "zeros before training")])
def test_shares_are_those_of_the_weights(name: str) -> None:
    finish, expected = FINISHES[name]
    found = shares(finish)
    assert found == (None if expected is None else [pytest.approx(expected, abs=2e-4)])


def test_a_head_of_zeros_is_replaced_by_chance() -> None:
    model = Model(lambda model, x: weighted(model, x) @ model.head)
    with torch.no_grad():
        model.head.zero_()
    _, found = conclusions(model)
    assert found.readouts is not None
    taken = found.readouts.shares()
    assert taken is not None
    assert bool((taken[0] > 0).any())
    assert taken[0].sum(1).tolist() == pytest.approx([1, 1])


def test_shares_follow_the_weights() -> None:
    model = Model(weighted)
    _, found = conclusions(model)
    readouts = found.readouts
    assert readouts is not None
    first = readouts.shares()
    assert first is not None
    assert readouts.shares() is first
    with torch.no_grad():
        model.parts.copy_(torch.tensor([1.0, 0, 0, 0, 0, 3.0]))
    second = readouts.shares()
    assert second is not None
    assert second[0][0].tolist() == pytest.approx([0.25, 0, 0, 0, 0, 0.75])
    model.parts = nn.Parameter(model.parts.detach().clone())
    assert readouts.shares() is second
    model.parts = nn.Parameter(model.parts.detach().double())
    third = readouts.shares()
    assert third is not second
    assert third is not None
    assert third[0][0].tolist() == pytest.approx([0.25, 0, 0, 0, 0, 0.75])


@pytest.mark.parametrize("rows", [3, 300])  # of a small weight, which is copied, and of a large one, which leaves a mark
def test_shares_are_taken_again_when_a_weight_was_written(rows: int) -> None:
    model = Model(lambda model, x: x.mean(1) + model.get_parameter("weight")[:1, :1])
    model.weight = nn.Parameter(torch.zeros(rows, 300))
    _, found = conclusions(model)
    readouts = found.readouts
    assert readouts is not None
    first = readouts.shares()
    assert first is not None
    assert readouts.shares() is first
    model.weight.data[-1, -1] = 1e-3
    assert readouts.shares() is not first


def test_the_cut_is_the_result_of_attention_if_the_next_call_merges_its_tokens() -> None:
    tape, found = conclusions(Model(lambda model, x: x.mean(1)))
    assert found.cut is not None
    (part,) = found.cut.parts
    (last,) = [number for number, entry in enumerate(tape.entries) if entry.attention is not None]
    made, merged = tape.entries[last].outs[0], tape.entries[last + 1].outs[0]
    assert made is not None
    assert merged is not None
    assert (part.slot, part.layout, found.cut.entries, found.cut.outputs) == (made.slot, GRID, (last + 1,), (merged.slot,))
    assert found.cut.pools


def test_the_cut_lies_behind_layers_that_change_each_token_alone() -> None:
    tape, found = conclusions(Model(lambda model, x: F.layer_norm(x @ model.head, (CLASSES,)).relu().mean(1)))
    assert found.cut is not None
    (part,) = found.cut.parts
    assert found.cut.entries == (len(tape.entries) - 1,)
    before = tape.entries[-2].outs[0]
    assert before is not None
    assert part.slot == before.slot


@pytest.mark.parametrize("constant", [True, False])
def test_a_single_learned_query_is_the_token_of_the_cut(constant: bool) -> None:
    def answer(model: Model, x: Tensor, count: int = 1) -> Tensor:
        query = torch.ones(1, 1, WIDTH) if constant else model.query
        return F.scaled_dot_product_attention(query.expand(len(x), count, -1), x, x)

    tape, found = conclusions(Model(lambda model, x: answer(model, x)[:, 0] @ model.head))
    assert found.cut is not None
    last = max(number for number, entry in enumerate(tape.entries) if entry.attention is not None)
    made = tape.entries[last].outs[0]
    assert made is not None
    ((slot, tokens, layout),) = found.cut.parts
    assert (slot, tokens is None, layout.prefix) == (made.slot, constant, ("query0",))
    assert found.cut.entries == tuple(range(last + 1, len(tape.entries)))
    assert found.readouts is not None
    taken = found.readouts.shares()
    assert taken is not None
    assert [part.tolist() for part in taken] == [[[1.0], [1.0]]]
    two = conclusions(Model(lambda model, x: answer(model, x, 2).sum(1) @ model.head))[1]
    assert two.cut is None
    assert two.readouts is None


def test_outputs_that_hold_tokens_apart_do_not_pool() -> None:
    _, found = conclusions(Model(lambda model, x: x @ model.head))
    assert found.cut is not None
    assert not found.cut.pools
    _, found = conclusions(Model(lambda model, x: {"tokens": x, "mean": x.mean(1)}))
    assert found.cut is not None
    assert found.cut.pools


def test_the_class_token_and_the_patches_may_be_read_apart() -> None:
    assert shares(lambda model, x: x[:, 0] @ model.head, with_class=True) == [[1, 0, 0, 0, 0, 0, 0]]
    both = shares(lambda model, x: torch.cat([x[:, 0], 2 * x[:, 1:].mean(1)], 1) @ torch.ones(2 * WIDTH, 1), with_class=True)
    assert both is not None
    assert both[0] == pytest.approx([1 / 3] + [1 / 9] * 6, abs=2e-4)


def test_tokens_of_a_part_are_padded_to_the_layout() -> None:
    activation = torch.randn(2, 6, WIDTH)
    patches = Part(0, Tokens(GRID, 2, None), WITH_CLS)
    assert torch.equal(patches.take(activation, 2), torch.cat([torch.zeros(2, 1, WIDTH), activation], 1))
    prefix = TokenLayout("tokens", ("cls",), (), BOX)
    first = Part(0, Tokens(prefix, 2, None), WITH_CLS)
    assert torch.equal(first.take(activation[:, :1], 2), torch.cat([activation[:, :1], torch.zeros(2, 6, WIDTH)], 1))
    whole = Part(0, Tokens(GRID, 2, None), GRID)
    assert torch.equal(whole.take(activation, 2), activation)
    answer = Part(0, None, prefix)
    assert torch.equal(answer.take(activation, 2), activation.view(2, 1, 6 * WIDTH))


def test_cuts_pool_unless_their_parts_are_the_outputs() -> None:
    parts = Part(4, None, GRID), Part(7, None, GRID)
    assert not Cut(parts, (), (7,)).pools
    assert not Cut(parts, (), (4, 7)).pools
    assert Cut(parts, (), (4, 8)).pools


def test_a_tensor_may_hold_a_part_of_a_layout() -> None:
    prefix = TokenLayout("pool", ("cls",), (), BOX)
    holed = TokenLayout("tokens", ("cls",), (2, 3), BOX, (1,))
    assert _holds(WITH_CLS, WITH_CLS)
    assert _holds(GRID, WITH_CLS)
    assert _holds(prefix, WITH_CLS)
    assert not _holds(WITH_CLS, GRID)
    assert not _holds(GRID, holed)
    assert not _holds(TokenLayout("tokens", (), (3, 2), BOX), WITH_CLS)
    assert not _holds(TokenLayout("tokens", (), (2, 3), Box(0, 0, 8, 11)), WITH_CLS)
    assert not _holds(TokenLayout("tokens", ("other",), (2, 3), BOX), WITH_CLS)
    assert not _holds(TokenLayout("pool", ("other",), (), BOX), WITH_CLS)
    assert not _holds(prefix, TokenLayout("tokens", ("cls",), (), BOX))
    assert _holds(TokenLayout("tokens", (), (2, 3), BOX, (1,)), holed)


def test_gradients_are_taken_in_single_precision() -> None:
    single, numbers = torch.ones(2), torch.arange(3)
    assert _plain(single) is single
    assert _plain(numbers) is numbers
    assert _plain(torch.ones(2, dtype=torch.float64)).dtype == torch.float32
    assert _plain(torch.ones(2, dtype=torch.float16)).dtype == torch.float32
    assert _plain(torch.ones(2, dtype=torch.bool)).dtype == torch.bool
    with torch.inference_mode():
        without = torch.ones(2)
    assert not _plain(without).is_inference()


def test_weights_are_compared_by_content_and_kind() -> None:
    weights = torch.arange(3.0)
    assert _is_same(weights, weights.clone())
    assert not _is_same(weights, weights + 1)
    assert not _is_same(weights, weights.double())
    assert not _is_same(None, weights)
    assert not _is_same(weights, weights[:0])


@pytest.mark.parametrize(
    ("vectors", "parallel"),
    [
        ([[1, 2], [2, 4], [-3, -6]], True),
        ([[1, 2], [2, 4], [-3, 6]], False),
        ([[0, 0], [2, 4], [1, 2]], True),
        ([[0, 0], [0, 0]], True),
        ([[1, 0], [1, 0.005]], True),
        ([[1, 0], [1, 0.03]], False),
        ([[1, 0], [1e-13, 1e-13]], True),  # as good as zero
        ([[1, 0], [1e-11, 1e-11]], False),
        ([[1, 1, 1], [1, 1, -1]], False),
    ],
)
def test_vectors_are_parallel_if_all_have_one_direction(vectors: list[list[float]], parallel: bool) -> None:
    assert _are_parallel(torch.tensor(vectors, dtype=torch.float64)) is parallel


def test_probes_stand_for_all_numbers_of_an_output() -> None:
    ends = [torch.zeros(2, 3), torch.zeros(2, 1, 2)]
    few = _probes(ends, 2, at_output=True)
    assert [[tuple(probe.shape) for probe in probes] for probes in few] == [[(2, 3), (2, 1, 2)]] * 5
    rows = torch.stack([torch.cat([probe.flatten(1) for probe in probes], 1) for probes in few])
    assert torch.equal(rows, torch.eye(5)[:, None].expand(5, 2, 5))
    many = _probes([torch.zeros(2, 17)], 2, at_output=True)
    assert len(many) == 16
    assert torch.equal(many[0][0][0], many[0][0][1])
    other = _probes([torch.zeros(3, 2)], 2, at_output=True)
    assert len(other) == 16
    assert not torch.equal(other[0][0], other[1][0])
    inner = _probes(ends, 2, at_output=False)
    assert [[tuple(probe.shape) for probe in probes] for probes in inner] == [[(2, 3), (2, 1, 2)]]
    assert torch.equal(inner[0][0], _probes(ends, 2, at_output=False)[0][0])
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(inner[0][0], torch.randn(2, 3, generator=generator))
