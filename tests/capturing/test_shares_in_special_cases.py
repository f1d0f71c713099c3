"""Shares of tokens in outputs that read several tensors, none, or values that change, and directions that count as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests.capturing.behind import OPS, SIZE, Chain
from visattn.core.capturing.following.conclusions import concluded
from visattn.core.capturing.following.cut import Cut, Part
from visattn.core.capturing.following.tape_readouts import Readouts, _are_parallel, _probes
from visattn.core.capturing.placing.weak import Home
from visattn.core.capturing.trace.call_tensors import SWITCH
from visattn.core.capturing.trace.tape import TAPES, Outside
from visattn.core.records import TokenLayout

Finish = Callable[["Model", Tensor], Any]


class Model(nn.Module):
    """A class token and two by three patches that attend to each other; `finish` computes the output from the result."""

    def __init__(self, finish: Finish) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.finish = nn.Conv2d(3, SIZE, 4, 4), finish
        self.cls_token, self.turn = nn.Parameter(torch.randn(1, 1, SIZE)), nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: Tensor) -> Any:
        tokens = self.embed(x).flatten(2).mT
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1)
        return self.finish(self, F.scaled_dot_product_attention(tokens, tokens, tokens))


def shares(finish: Finish) -> list[list[float]] | None:
    """Return the shares of the seven tokens in each tensor of the cut; they are the same for both images."""
    model = Model(finish).eval()
    with torch.no_grad(), visattn.capture(model):
        model(torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0)))
    readouts = concluded(TAPES.of(model)[0]).readouts
    assert readouts is not None
    taken = readouts.shares()
    if taken is None:
        return None
    assert all(torch.allclose(part[0], part[1], atol=1e-5) for part in taken)
    return [[round(float(share), 3) for share in part[0]] for part in taken]


def test_several_outputs_count_together() -> None:
    assert shares(lambda model, x: (x[:, 1], x[:, 3] * 2)) == [[0, 0.333, 0, 0.667, 0, 0, 0]]


def test_an_output_that_lets_no_gradient_through_has_no_shares() -> None:
    assert shares(lambda model, x: x.detach().mean(1)) == [[0.0] * 7]


def test_values_behind_two_inner_ends_may_change_the_shares() -> None:
    assert shares(lambda model, x: x.mean(1).relu()) == [[0.143] * 7]
    assert shares(lambda model, x: x.mean(1).relu() + x[:, 0].relu()) is None


# --- by hand


def mean_of(chain: Chain, *, scaled: bool = False) -> Readouts:
    """Return the readout of a mean over tokens, which may be scaled by a tensor that a call makes from the one in slot 1."""
    x, other, factor = chain.tokens(), chain.learned(SIZE), chain.learned(SIZE)
    mean, result = chain.lost(2, SIZE), chain.lost(2, SIZE)
    chain.call(OPS.neg.default, factor, self=other)
    chain.tape.entries[-1].func = torch.neg
    chain.call(OPS.mean.dim, mean, self=x, dim=[1])
    chain.tape.entries[-1].func, chain.tape.entries[-1].kwargs = torch.mean, {"dim": 1}
    chain.call(OPS.mul.Tensor, result, self=mean, other=factor)
    chain.tape.entries[-1].func = torch.mul
    cut = Cut((Part(int(x), None, TokenLayout("tokens", (), (2, 3), chain.planes.input)),), (1, 2), (int(result),))
    if not scaled:
        cut = cut._replace(entries=(1,), outputs=(int(mean),))
    return Readouts(chain.tape, cut, 2)


def test_a_forward_pass_that_switches_gradients_has_no_shares() -> None:
    for number, found in ((0, True), (1, False), (2, False)):
        chain = Chain()
        readouts = mean_of(chain)
        entry = chain.entry([], [], None)
        chain.tape.entries.insert(number, chain.tape.entries.pop())
        entry.func = SWITCH
        numbers = (2,) if number < 2 else (1,)
        readouts = Readouts(chain.tape, readouts._cut._replace(entries=numbers if number != 1 else (1, 2)), 2)
        assert (readouts.shares() is not None) is found, number


class Kept(nn.Module):
    """Module with one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_a_factor_is_computed_again_unless_it_comes_from_the_image() -> None:
    model, chain = Kept(), Chain()
    readouts = mean_of(chain, scaled=True)
    chain.tape.outside[1] = Outside("buffer", "kept", torch.Size((SIZE,)), True, Home(model, "_buffers", "kept"))
    taken = readouts.shares()
    assert taken is not None
    assert taken[0].tolist() == [[1.0], [1.0]]
    assert mean_of(chain, scaled=True)._repeats.used == []
    for change in ("descends", "unknown", "homeless"):
        other = Chain()
        changing = mean_of(other, scaled=True)
        home = None if change == "homeless" else Home(model, "_buffers", "kept")
        other.tape.outside[1] = Outside("buffer", "kept", torch.Size((SIZE,)), True, home)
        if change == "descends":
            other.tape.descends.add(2)
        if change == "unknown":
            del other.tape.outside[1]
        assert changing.shares() is None


def of_two(turn: Tensor, *, activated: bool, ignored: bool = False) -> tuple[Tensor, ...] | None:
    """Return the shares of two tokens, the first of which a matrix turns, or only gives a shape, before both are added."""
    model, chain = nn.Linear(SIZE, SIZE), Chain()
    model.weight = nn.Parameter(turn)
    places = chain.shadows.of(chain.tokens(chain.codes[:, :1]))
    first, second, turned, total, result = (chain.put(places) for _ in range(5))
    weight = chain.learned(SIZE, SIZE)
    chain.tape.outside[int(weight)] = Outside(
        "parameter", "w", torch.Size((SIZE, SIZE)), True, Home(model, "_parameters", "weight")
    )
    if ignored:
        chain.call(OPS.zeros_like.default, turned, self=first)
    else:
        chain.call(OPS.mm.default, turned, self=first, mat2=weight)
    chain.call(OPS.add.Tensor, total, self=turned, other=second)
    chain.call(OPS.relu.default, result, self=total)
    for entry, func in zip(
        chain.tape.entries, (torch.zeros_like if ignored else torch.matmul, torch.add, torch.relu), strict=True
    ):
        entry.func = func
    parts = tuple(Part(int(node), None, TokenLayout("pool", ("cls",), (), chain.planes.input)) for node in (first, second))
    ends = ((0, 1, 2), (int(result),)) if activated else ((0, 1), (int(total),))
    return Readouts(chain.tape, Cut(parts, *ends), 2).shares()


def test_what_follows_several_tensors_keeps_their_shares_if_all_have_one_direction() -> None:
    apart = torch.tensor([[0.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, -1], [0, 0, 2, 0]])
    for activated, turn, found in ((True, torch.eye(SIZE) * -3, True), (True, apart, False), (False, apart, True)):
        taken = of_two(turn, activated=activated)
        assert (taken is not None) is found
        assert [part.tolist() for part in taken or ()] == [[[1.0], [1.0]]] * 2 * found


def test_a_tensor_of_the_cut_that_only_gives_a_shape_has_no_share() -> None:
    taken = of_two(torch.eye(SIZE), activated=False, ignored=True)
    assert taken is not None
    assert [part.tolist() for part in taken] == [[[0.0], [0.0]], [[1.0], [1.0]]]


def test_probes_of_a_single_image_stand_for_its_numbers() -> None:
    found = _probes([torch.zeros(1, 3), torch.zeros(1, 2)], 1, at_output=True)
    rows = torch.stack([torch.cat(probes, 1) for probes in found])
    assert torch.equal(rows, torch.eye(5)[:, None])


@pytest.mark.parametrize(
    ("vectors", "parallel"),
    [
        ([[1.0, 0], [1, -0.012], [1, 0.012]], True),  # each is as good as parallel to the first
        ([[1, -0.012], [1.0, 0], [1, 0.012]], False),
        ([[1e6, 0], [1e-7, 1e-7]], True),  # zero in proportion to the largest
        ([[1e6, 0], [1e-5, 1e-5]], False),
        ([[1e-6, 0], [1e-12, 1e-12]], False),
    ],
)
def test_directions_are_compared_with_the_first_and_lengths_with_the_largest(vectors: list[list[float]], parallel: bool) -> None:
    assert _are_parallel(torch.tensor(vectors, dtype=torch.float64)) is parallel
