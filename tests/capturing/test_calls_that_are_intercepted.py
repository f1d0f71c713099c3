"""Calls of one layer that are intercepted: which are attention, how each is described, and what the receiver may read of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capturing.watched import Layer, Model, Seen, image, tokens, watched
from visattn.core.capturing.intercept import mode
from visattn.core.capturing.intercept.calls import FusedCall, ProductCall, SampledCall
from visattn.core.capturing.intercept.written_out import Product
from visattn.core.capturing.trace.product_axes import Permuted
from visattn.core.capturing.trace.tracer import Tracer

SDPA = F.scaled_dot_product_attention

RUN: Any = mode.CaptureMode._run_call


def written(x: Tensor) -> Tensor:
    """Return attention that is written out."""
    q = tokens(x)
    return (q @ q.mT).softmax(-1) @ q


def names(seen: Seen) -> list[str]:
    """Return the names of all operations on the tape."""
    return [entry.operation.name for entry in seen.tape().entries]


def made_by(seen: Seen, slot: int) -> str:
    """Return the name of the operation that made the tensor in a slot."""
    (name,) = (entry.operation.name for entry in seen.tape().entries for out in entry.outs if out and out.slot == slot)
    return name


# --- fused calls


@pytest.mark.parametrize("by_name", [(), ("value",), ("key", "value"), ("value", "query", "key")])
def test_operands_of_a_fused_call_may_be_positional_or_named(by_name: tuple[str, ...]) -> None:
    def run(x: Tensor) -> Tensor:
        given: Any = {"query": tokens(x).sin(), "key": tokens(x).cos(), "value": tokens(x).tan()}
        return SDPA(*(given[name] for name in given if name not in by_name), **{name: given[name] for name in by_name})

    seen, (out,) = watched(run, image())
    assert seen.layers == [("attn", 0)]
    assert torch.equal(out, run(image()))
    attention = seen.attention
    assert [made_by(seen, operand.slot) for operand in attention.operands] == ["sin", "cos", "tan"]
    assert [operand.groups for operand in attention.operands] == [1, 1, 1]
    assert (attention.fused, attention.position, attention.doubtful, attention.scores) == (True, None, False, None)
    assert (attention.lead, attention.rows, attention.columns) == ((2, 1), 6, 6)
    assert (attention.softmaxes, attention.samples, attention.answers_at_keys) == (frozenset(), (), False)
    assert seen.call.out is out


def test_heads_of_keys_and_values_are_repeated_in_groups() -> None:
    def run(x: Tensor) -> Tensor:
        q = torch.cat([tokens(x)] * 4, 1)
        return SDPA(q, q[:, :2], q[:, :2], enable_gqa=True)

    seen, _ = watched(run, image())
    assert [operand.groups for operand in seen.attention.operands] == [1, 2, 2]
    assert seen.attention.lead == (2, 4)


def test_calls_of_a_layer_are_counted_in_each_forward_pass() -> None:
    def run(x: Tensor) -> Tensor:
        q = tokens(x)
        return SDPA(q, q, q) + written(x)

    seen, _ = watched(run, image(), times=2)
    assert seen.layers == [("attn", 0), ("attn", 1)] * 2
    described = [attention for *_, attention in seen.calls]
    assert described[2:] == described[:2]  # the tape is known
    assert [isinstance(call, FusedCall) for _, _, call, _ in seen.calls] == [True, False] * 2
    assert seen.tape(0) is seen.tape(1)
    forgetful, _ = watched(run, image(), times=2, remember=False)
    assert forgetful.calls[0][3] is not forgetful.calls[2][3]


def test_forward_pass_that_overwrites_in_another_way_switches_to_its_own_tape() -> None:
    def run(x: Tensor, adds: bool) -> Tensor:
        y = x * 2
        return tokens(y.add_(1) if adds else y.mul_(3)) + written(x)

    model = Model(run)
    seen = Seen(model)
    with seen.watch.watching():
        for adds in (True, False, True, False, False):
            model(image(), adds)
    tapes = [seen.tape(number) for number in range(5)]
    assert tapes[0] is not tapes[1]
    assert [tape is tapes[number % 2] for number, tape in enumerate(tapes[:4])] == [True] * 4
    assert tapes[4] is tapes[1]


def test_owner_is_the_running_layer() -> None:
    model = nn.Sequential(nn.Identity(), Layer(lambda x: x + 1), Layer(written))
    seen = Seen(model, facts={"answers_at_keys": lambda module: module is model[2]})
    with seen.watch.watching():
        model(image())
    ((layer, owner, _, attention),) = seen.calls
    assert (layer, owner is model[2], attention.layer, attention.owner) == ("2", True, "2", 3)
    assert attention.answers_at_keys
    layers = {entry.operation.name: entry.layer for entry in seen.tape().entries}
    assert (layers["softmax"], layers["flatten"]) == ("2", "")


def test_attention_outside_the_forward_pass_is_not_seen() -> None:
    model, x = Model(written), image()
    seen = Seen(model)
    with seen.watch.watching():
        before = written(x)
        out = model(x)
        after = written(x)
    assert seen.layers == [("attn", 0)]
    assert torch.equal(before, out)
    assert torch.equal(after, out)


@pytest.mark.parametrize(("rows", "knows"), [(512, False), (513, True)])
def test_sums_of_the_kernel_are_kept_for_many_queries(rows: int, knows: bool) -> None:
    key = torch.randn(1, 1, 4, 2)
    query = torch.randn(1, 1, rows, 2)
    call = FusedCall(query, key, key)
    out = RUN(None, None, call, lambda args, kwargs: SDPA(*args, **kwargs), (query, key, key), {"scale": 0.5})
    assert torch.equal(out, SDPA(query, key, key, scale=0.5))
    assert (call.lse is not None) == knows
    if call.lse is not None:
        assert torch.allclose(call.lse, (query @ key.mT / 2).logsumexp(-1), atol=1e-5)


def test_long_product_has_no_sums_of_a_kernel() -> None:
    weights, value = torch.rand(1, 600, 2), torch.rand(1, 2, 3)
    call = ProductCall(Product(weights, value, Permuted(None, None, (0, 1, 2)), 0, False))
    out = RUN(None, None, call, lambda args, _: torch.bmm(*args), (weights, value), {})
    assert torch.equal(out, weights @ value)


def test_multihead_attention_runs_in_parts() -> None:
    model = nn.Sequential(nn.Flatten(2), nn.ReLU())
    attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def run(x: Tensor) -> Tensor:
        q = model(x)
        out: Tensor = attention(q, q, q)[0]
        return out

    seen, (out,) = watched(run, image().requires_grad_())
    assert seen.layers == [("attn", 0)]
    assert seen.attention.lead == (4,)
    assert "softmax" in names(seen)
    assert torch.equal(out, run(image()))


def test_opened_function_does_not_hand_itself_over() -> None:
    def asks(x: int, y: int = 2, *, z: int = 3) -> Any:
        return has_torch_function((x,)), x, y, z  # type: ignore[name-defined] # noqa: F821

    opened = mode._opened(asks)  # type: ignore[arg-type]
    assert opened(1) == (False, 1, 2, 3)
    assert opened(4, 5, z=6) == (False, 4, 5, 6)


# --- products of weights and values


@pytest.mark.parametrize("times", [1, 2])
def test_product_is_described_by_its_weights_and_scores(times: int) -> None:
    seen, outputs = watched(written, image(), times=times)
    attention = seen.attention
    product = names(seen).index("softmax") - 1
    assert (attention.softmaxes, attention.scores) == (frozenset({product + 1}), product)
    assert [entry.scoring for entry in seen.tape().entries] == [number == product for number in range(len(names(seen)))]
    assert made_by(seen, attention.operands[0].slot) == "softmax"
    assert [operand.weighs for operand in attention.operands] == [True, False]
    assert (attention.fused, attention.position, attention.doubtful, attention.samples) == (False, 0, False, ())
    assert (attention.lead, attention.rows, attention.columns) == ((2, 1), 6, 6)
    assert torch.equal(outputs[-1], written(image()))
    assert seen.call.out is outputs[-1]
    assert [len(entry.steps) > 0 for entry in seen.tape().entries] == [True] * len(names(seen))


@pytest.mark.parametrize("times", [1, 2])
def test_values_may_come_before_the_weights(times: int) -> None:
    def run(x: Tensor) -> Tensor:
        q = tokens(x)
        return q.mT @ (q @ q.mT).softmax(-1).mT

    seen, _ = watched(run, image(), times=times)
    assert len(seen.calls) == times
    assert seen.attention.position == 1
    assert [operand.weighs for operand in seen.attention.operands] == [True, False]
    assert torch.allclose(seen.call.weigh().sum(-1), torch.ones(()))


def test_operands_by_name_are_put_in_order() -> None:
    def run(x: Tensor) -> Tensor:
        q = tokens(x)
        return torch.matmul(other=q, input=(q @ q.mT).softmax(-1))

    seen, _ = watched(run, image())
    assert (seen.layers, seen.attention.position) == ([("attn", 0)], 0)
    assert torch.allclose(seen.call.weigh().sum(-1), torch.ones(()))


def test_product_of_other_matrices_is_no_attention() -> None:
    seen, _ = watched(lambda x: tokens(x) @ tokens(x).mT @ tokens(x), image())
    assert seen.calls == []
    assert names(seen).count("matmul") + names(seen).count("__matmul__") == 2


@pytest.mark.parametrize("of_image", [True, False])
def test_weights_without_images_attend_only_to_values_of_the_image(of_image: bool) -> None:
    def run(x: Tensor) -> Tensor:
        values = tokens(x) if of_image else model.get_parameter("attn.values")
        return model.get_parameter("attn.table").softmax(-1) @ values + x.sum()

    model = Model(run)
    model.attn.table, model.attn.values = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 4))
    seen = Seen(model)
    with seen.watch.watching():
        for _ in range(2):
            model(image())
    assert len(seen.calls) == 2 * of_image
    assert not of_image or seen.attention.doubtful


def test_weights_of_images_may_attend_to_learned_values() -> None:
    def run(x: Tensor) -> Tensor:
        q = tokens(x)
        return (q @ q.mT).softmax(-1) @ model.get_parameter("attn.values")

    model = Model(run)
    model.attn.values = nn.Parameter(torch.randn(1, 1, 6, 4))
    seen = Seen(model)
    with seen.watch.watching():
        for _ in range(2):
            model(image())
    assert seen.layers == [("attn", 0)] * 2
    assert not seen.attention.doubtful


def test_operands_of_scores_are_not_handed_over_unasked() -> None:
    seen, _ = watched(written, image(), times=2)
    assert [call.scored for _, _, call, _ in seen.calls if isinstance(call, ProductCall)] == [None, None]


def test_operands_of_scores_are_handed_over_if_they_are_asked_for() -> None:
    def run(x: Tensor) -> Tensor:
        q, k = tokens(x).sin(), tokens(x).cos()
        return (q @ k.mT).softmax(-1) @ q

    for asked in (True, False):
        seen, _ = watched(run, image(), times=2, vectors=asked)
        for _, _, call, attention in seen.calls:
            assert isinstance(call, ProductCall)
            assert attention.scores is not None
            if not asked:
                assert call.scored is None
                continue
            assert call.scored is not None
            assert torch.equal(call.scored[0], tokens(image()).sin())
            assert torch.equal(call.scored[1], tokens(image()).cos().mT)


@pytest.mark.parametrize(("vectors", "held"), [(False, 0), (True, 1)])
def test_known_forward_pass_holds_only_the_operands_that_are_needed(vectors: bool, held: int) -> None:
    counts: list[int] = []
    seen: Seen | None = None

    def count(*_: Any) -> None:
        assert seen is not None
        counts.append(len(seen.watch._mode.held._held))

    model = Model(lambda x: written(x) @ tokens(x).mT)
    seen = Seen(model, count, vectors=vectors)
    with seen.watch.watching():
        for _ in range(3):
            model(image())
        assert not seen.watch._mode.held._held
    assert counts == [held] * 3


# --- sums over elementwise products


def summed(x: Tensor) -> Tensor:
    q = tokens(x)
    weights = (q @ q.mT).softmax(-1)
    return (weights[..., None] * q[..., None, :, :]).sum(-2)


@pytest.mark.parametrize("vectors", [False, True])
def test_sum_over_keys_is_attention_in_each_forward_pass(vectors: bool) -> None:
    seen, outputs = watched(summed, image(), times=3, vectors=vectors)
    assert seen.layers == [("attn", 0)] * 3
    assert (seen.attention.position, seen.attention.doubtful, seen.attention.rows) == (0, True, 6)
    kept = [entry.operation.name for entry in seen.tape().entries if entry.kept]
    assert len(kept) == 1
    assert kept[0].strip("_") == "mul"
    assert torch.allclose(outputs[2], written(image()), atol=1e-6)
    for _, _, call, _ in seen.calls:
        assert isinstance(call, ProductCall)
        assert (call.scored is not None) == vectors
        assert torch.allclose(call.weigh(), (tokens(image()) @ tokens(image()).mT).softmax(-1))


def test_sum_of_a_named_tensor_is_attention() -> None:
    def run(x: Tensor) -> Tensor:
        q = tokens(x)
        weights = (q @ q.mT).softmax(-1)
        return torch.sum(input=weights[..., None] * q[..., None, :, :], dim=-2)

    seen, _ = watched(run, image(), times=2)
    assert seen.layers == [("attn", 0)] * 2


def test_samples_of_maps_are_weighted_at_their_points() -> None:
    points = torch.rand(2, 5, 4, 2) * 2 - 1

    def run(x: Tensor) -> Tensor:
        weights = F.grid_sample(x[:, :1], points, align_corners=False).softmax(-1)
        return (F.grid_sample(x, points, align_corners=False) * weights).sum(-1)

    seen, outputs = watched(run, image(), times=3)
    assert seen.layers == [("attn", 0)] * 3
    sampling = [number for number, name in enumerate(names(seen)) if name == "grid_sample"][1]
    assert seen.attention.samples == (sampling,)
    kept = [number for number, entry in enumerate(seen.tape().entries) if entry.kept]
    assert kept == [sampling, sampling + 1]
    assert torch.equal(outputs[2], run(image()))
    for _, _, call, _ in seen.calls:
        assert isinstance(call, SampledCall)
        assert torch.equal(call.sources()[1], points)
        assert call.columns == 4


def test_samples_at_points_that_were_overwritten_are_mere_values() -> None:
    def run(x: Tensor) -> Tensor:
        points = torch.zeros(2, 5, 4, 2)
        samples = F.grid_sample(x, points, align_corners=False)
        weights = samples[:, :1].softmax(-1)
        multiplied = samples * weights
        points.add_(1)
        return multiplied.sum(-1)

    seen, _ = watched(run, image(), times=2)
    assert seen.layers == [("attn", 0)] * 2
    assert seen.attention.samples == ()
    assert [type(call) for _, _, call, _ in seen.calls] == [ProductCall] * 2


def test_call_that_cannot_be_noted_leaves_the_tape_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("an unusual tensor")

    seen, _ = watched(written, image())
    assert seen.tape().whole
    monkeypatch.setattr(Tracer, "met", fail)
    seen, (out,) = watched(written, image())
    assert not seen.tape().whole
    assert torch.equal(out, written(image()))


# --- results that replace those of the model


def test_model_continues_with_the_tensor_that_replaces_a_result() -> None:
    given = torch.full((2, 1, 6, 3), 7.0)
    ran: list[str] = []

    def replace(layer: str, owner: nn.Module, call: Any, attention: Any, _compute: Any) -> Tensor | None:
        assert (layer, type(owner), attention.layer) == ("attn", Layer, "attn")
        ran.append(type(call).__name__)
        return given if len(ran) % 2 else None

    def run(x: Tensor) -> Tensor:
        q = tokens(x)
        return SDPA(q, q, q) + 1

    for run_attention in (run, lambda x: written(x) + 1):
        ran.clear()
        seen, (first, second) = watched(run_attention, image(), times=2, replace=replace)
        assert torch.equal(first, given + 1)
        assert torch.equal(second, run_attention(image()))
        assert [call.out is given for _, _, call, _ in seen.calls] == [True, False]
        assert [attention.call for *_, attention in seen.calls] == [0, 0]
        assert len(seen.forwards) == 2


def test_image_is_exchanged_wherever_a_call_takes_it() -> None:
    old, new, other = torch.zeros(1), torch.ones(1), torch.zeros(1)
    given = (old, [other, (old, 3)], {"a": old, "b": [other]})
    changed = mode._exchanged(given, old, new)
    assert changed[0] is new
    assert changed[1][0] is other
    assert changed[1][1][0] is new
    assert changed[1][1][1] == 3
    assert changed[2]["a"] is new
    assert changed[2]["b"][0] is other
    assert (type(changed), type(changed[1]), type(changed[1][1])) == (tuple, list, tuple)
    size = torch.Size((1, 2))
    assert mode._exchanged(size, old, new) is size
