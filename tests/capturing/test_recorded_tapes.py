"""Recording of a tape: slots of tensors from outside, arguments and results of calls, what descends from the image, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from visattn.core.capturing.trace.call_tensors import SWITCH, Untraceable
from visattn.core.capturing.trace.tape import STRANGE, Attention, Entry, Made, Outside, Ref, Tape
from visattn.core.capturing.trace.tracer import Tracer

SHAPE = torch.Size((2, 3))


def begun(
    pixels: Tensor | None = None,
    inputs: Sequence[tuple[str, Tensor]] = (),
    model: nn.Module | None = None,
    candidates: Iterable[Tape] = (),
    **options: Any,
) -> Tracer:
    """Begin a forward pass whose running module is always `layer`, of a model that is one module, `block.proj`."""
    names = {} if model is None else {model: "block.proj"}
    return Tracer(pixels, inputs, names, lambda: "layer", candidates, **options)


def call(tracer: Tracer, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call that is new to the tape."""
    out = tracer.run(func, args, kwargs)
    tracer.met(func, args, kwargs, out)
    return out


def last(tracer: Tracer) -> Entry:
    return tracer.tape.entries[-1]


def tensor(*shape: int) -> Tensor:
    return torch.ones(shape or SHAPE)


# --- tensors from outside


def test_forward_pass_begins_with_the_pixels_and_the_other_inputs() -> None:
    x, mask = tensor(2, 3, 4, 4), torch.zeros(5, dtype=torch.long, device="meta")
    tracer = begun(x, [("x", x), ("mask", mask)])
    expected = [Outside("pixels", "", x.shape, True), Outside("input", "mask", torch.Size((5,)), False)]
    assert list(tracer.tape.outside.items()) == list(enumerate(expected))
    assert (tracer.slot_of(x), tracer.slot_of(mask)) == (0, 1)
    assert (tracer.tape.descends, tracer.tape.device, tracer.tape.packed) == ({0}, torch.device("cpu"), ())
    assert (tracer.at, tracer.known, tracer.kept, tracer.used) == (0, False, {}, {})
    assert tracer.tape.origins == {0: ("pixels", ""), 1: ("input", "mask")}
    without = begun(None, [("mask", mask)])
    assert [outside.kind for outside in without.tape.outside.values()] == ["input"]
    assert without.tape.descends == set()
    elsewhere = begun(torch.zeros(1, 3, 4, 4, device="meta"))
    assert elsewhere.tape.device == torch.device("meta")


def test_tensor_that_is_met_first_gets_the_next_slot() -> None:
    x, model = tensor(), nn.Linear(3, 3)
    tracer = begun(x, [("given", model.bias)], model)
    stranger, number = tensor(), torch.tensor(3.0)
    assert [tracer.place_of(one) for one in (model.weight, stranger, number, x, stranger)] == [2, 3, 4, 0, 3]
    outside = tracer.tape.outside
    assert [(outside[slot].kind, outside[slot].name) for slot in (1, 2, 3, 4)] == [
        ("input", "given"),
        ("parameter", "proj"),
        ("unknown", ""),
        ("unknown", ""),
    ]
    assert tracer.tape.descends == {0, 3}
    home = outside[2].home
    assert home is not None
    assert home.holds(model.weight)
    assert [outside[slot].home for slot in (0, 1, 3, 4)] == [None] * 4


def test_tensor_of_a_transform_has_no_slot() -> None:
    tracer, refused = begun(tensor()), []

    def see(one: Tensor) -> Tensor:
        with pytest.raises(Untraceable):
            tracer.place_of(one)
        refused.append(tracer.slot_of(one))
        return one

    torch.vmap(see)(tensor())
    assert refused == [None]
    assert len(tracer.tape.outside) == 1


def test_what_may_depend_on_the_image_descends_from_it() -> None:
    x, model = tensor(), nn.Linear(3, 3)
    tracer = begun(x, model=model)
    made, learned = call(tracer, torch.neg, x), call(tracer, torch.neg, model.weight)
    assert [tracer.descends(one) for one in (x, made, tensor())] == [True] * 3
    assert [tracer.descends(one) for one in (learned, model.weight, 3, None)] == [False] * 4


def test_exchanged_tensor_is_of_unknown_origin() -> None:
    model = nn.Linear(3, 3)
    tracer = begun(tensor(), model=model)
    assert tracer.place_of(model.weight) == 1
    tracer.exchanged(model.weight)
    assert tracer.slot_of(model.weight) is None
    assert tracer.place_of(model.weight) == 2
    assert tracer.tape.outside[2].kind == "unknown"
    assert tracer.tape.origins[int(tracer.tape.nodes[2])] == ("unknown", "")


# --- calls


def test_call_is_recorded_with_arguments_and_results() -> None:
    x, model = tensor(), nn.Linear(3, 3)
    tracer = begun(x, model=model)
    out = call(tracer, torch.add, x, model.weight[:2], alpha=2)
    entry = last(tracer)
    assert entry.func is torch.add
    assert [ref.slot for ref in entry.refs] == [0, 1]
    assert entry.kwargs == {"alpha": 2}
    assert entry.outs == (Made(2, SHAPE, True),)
    assert (entry.before, entry.shapes, entry.writes, entry.layer) == ((None,), (SHAPE,), False, "")
    assert (tracer.at, tracer.slot_of(out)) == (1, 2)
    call(tracer, torch.max, out, 1)
    entry = last(tracer)
    assert entry.outs == (Made(3, torch.Size((2,)), True), Made(4, torch.Size((2,)), False))
    assert (tracer.at, entry.shapes, entry.before) == (2, None, (None, None))
    assert tracer.tape.descends == {0, 1, 2, 3, 4}
    assert {*tracer.tape.nodes} == {0, 1, 2, 3, 4}
    assert all(tracer.tape.facts[node].shape for node in tracer.tape.nodes.values())


def test_call_that_returns_no_tensor_is_no_entry() -> None:
    x = tensor()
    tracer = begun(x)
    assert call(tracer, Tensor.size, x) == SHAPE
    assert call(tracer, torch.equal, x, x)
    assert (tracer.at, tracer.tape.entries) == (0, [])
    before = torch.is_grad_enabled()
    call(tracer, SWITCH, before)
    assert [(entry.func, entry.args, entry.outs) for entry in tracer.tape.entries] == [(SWITCH, (before,), ())]


@pytest.mark.parametrize(
    ("func", "layer"),
    [(torch.matmul, "layer"), (torch.softmax, "layer"), (F.linear, "layer"), (torch.add, ""), (lambda a, b: a + 1, "layer")],
)
def test_layer_is_noted_for_calls_that_may_be_attention_or_are_unknown(func: Callable[..., Any], layer: str) -> None:
    x = tensor(3, 3)
    tracer = begun(x)
    call(tracer, func, x, 1 if func is torch.softmax else x)
    assert last(tracer).layer == layer


def test_operations_of_a_call_belong_to_its_entry() -> None:
    x = tensor()
    tracer = begun(x)
    call(tracer, F.linear, x, tensor(4, 3))
    call(tracer, torch.neg, x)
    assert [[str(step.op).split(".")[1] for step in entry.steps] for entry in tracer.tape.entries] == [["t", "mm"], ["neg"]]


def attention(*, fused: bool = False, doubtful: bool = False) -> Attention:
    return Attention("layer", 0, 0, (), fused, (), 2, 2, doubtful=doubtful)


def attend(tracer: Tracer, *args: Any, **facts: bool) -> Tensor:
    out: Tensor = tracer.run(torch.matmul, args, {})
    tracer.write(torch.matmul, args, {}, out, attention(**facts))
    return out


def test_steps_of_a_fused_call_are_not_its_own() -> None:
    x = tensor(2, 2)
    tracer = begun(x)
    attend(tracer, x, x)
    assert len(last(tracer).steps) == 1
    attend(tracer, x, x, fused=True)
    assert last(tracer).steps == ()
    assert last(tracer).attention is not None


def test_operator_of_higher_order_runs_without_notes() -> None:
    class Twice(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("visattn_twice")  # type: ignore[no-untyped-call]

        def __call__(self, x: Tensor, *, plus: int) -> Tensor:
            return x * 2 + plus

    x = tensor()
    tracer = begun(x)
    assert torch.equal(call(tracer, Twice(), x, plus=3), torch.full(SHAPE, 5.0))
    assert last(tracer).steps == ()


# --- tapes that no other forward pass may rely on


def custom(x: Tensor) -> Tensor:
    return x + 1


class Custom:
    """Callable that is no function of Python."""

    __name__ = "custom"

    def __call__(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.mark.parametrize(
    ("func", "whole"),
    [(torch.neg, True), (F.gelu, True), (F.softplus, True), (F.hardtanh, True), (custom, False), (Custom(), True)],
)
def test_function_of_other_code_leaves_a_tape_that_is_not_whole(func: Callable[..., Any], whole: bool) -> None:
    x = tensor()
    tracer = begun(x)
    call(tracer, func, x)
    assert (tracer.tape.whole, tracer.at) == (whole, 1)


def test_backward_pass_leaves_a_tape_that_is_not_whole() -> None:
    for func in (Tensor.backward, torch.autograd.grad):
        x = tensor().requires_grad_()
        tracer = begun(x)
        total = call(tracer, torch.sum, x)
        call(tracer, func, total, *([x] if func is torch.autograd.grad else []))
        assert not tracer.tape.whole


def test_call_inside_a_transform_is_not_recorded() -> None:
    tracer = begun(tensor())
    tape = tracer.tape
    assert torch.vmap(lambda one: call(tracer, torch.neg, one))(tensor()).shape == SHAPE
    assert (tracer.tape is tape, tracer.at, tape.whole) == (True, 0, False)


# --- overwritten tensors


def test_overwritten_tensor_and_its_views_continue_in_new_slots() -> None:
    x = tensor()
    tracer = begun(x)
    made = call(tracer, torch.neg, x)
    view = call(tracer, Tensor.select, made, 0, 1)
    call(tracer, Tensor.mul_, made, 3)
    entry = last(tracer)
    assert (entry.writes, entry.before, entry.rewritten, entry.shapes) == (True, (1,), ((2, 3),), (made.shape,))
    assert (tracer.slot_of(view), tracer.slot_of(made)) == (3, 4)
    assert tracer.tape.descends == {0, 1, 2, 3, 4}
    assert tracer.tape.nodes[4] > tracer.tape.nodes[2] == tracer.tape.nodes[3] > tracer.tape.nodes[1]
    made.add_(1)
    assert tracer.slot_of(made) is None


def test_tensor_may_be_met_first_where_it_is_overwritten() -> None:
    tracer, fresh = begun(tensor()), tensor()
    call(tracer, Tensor.mul_, fresh, 3)
    assert [outside.kind for outside in tracer.tape.outside.values()] == ["pixels", "unknown"]
    assert (last(tracer).writes, tracer.slot_of(fresh)) == (True, 2)
    out = tensor()
    call(tracer, torch.add, fresh, 1, out=out)
    assert last(tracer).writes
    assert tracer.slot_of(out) == 4


def test_setting_an_item_returns_what_it_overwrites() -> None:
    x = tensor()
    tracer = begun(x)
    call(tracer, Tensor.__setitem__, x, 0, 5.0)
    assert (tracer.slot_of(x), last(tracer).outs, last(tracer).before) == (1, (Made(1, SHAPE, True),), (0,))


def test_tensor_that_got_other_memory_has_a_new_number() -> None:
    x, other = tensor(), tensor()
    tracer = begun(x, [("other", other)])
    call(tracer, Tensor.data.__set__, x, other)  # type: ignore[attr-defined]
    assert (last(tracer).before, last(tracer).rewritten) == ((0,), ((1, 2),))
    assert (tracer.slot_of(x), tracer.tape.nodes[2], tracer.tape.nodes[3]) == (3, 1, 2)
    call(tracer, torch.neg, other)
    assert last(tracer).steps[0].given == {"self": 1}


# --- arguments


class Pair(NamedTuple):
    """Two tensors with names."""

    first: Any
    second: Any


class Listing(list[Any]):
    """List of other code."""


def given(value: Any, *tensors: Tensor) -> Any:
    """Return an argument as the tape holds it; the tensors have slots from 1 on."""
    tracer = begun(tensor(), [(str(number), one) for number, one in enumerate(tensors)])
    return tracer._noted(value)


def seen(value: Any) -> Any:
    """Return an argument of the tape with slots in place of references."""
    if isinstance(value, Ref):
        return f"slot {value.slot}"
    if isinstance(value, dict):
        return {name: seen(item) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(seen(value.start), seen(value.stop), seen(value.step))
    return type(value)(map(seen, value)) if isinstance(value, (list, tuple)) else value


def test_tensors_in_arguments_become_slots() -> None:
    a, b = tensor(), tensor()
    nested = [a, (b, 2, [None, a])], {"x": b, "y": {"z": (a,)}}
    assert seen(given(nested, a, b)) == (["slot 1", ("slot 2", 2, [None, "slot 1"])], {"x": "slot 2", "y": {"z": ("slot 1",)}})
    parts = seen(given(slice(a, 4, b), a, b))
    assert (parts.start, parts.stop, parts.step) == ("slot 1", 4, "slot 2")
    assert seen(given(Listing([a, 1, b]), a, b)) == ["slot 1", 1, "slot 2"]
    assert type(given(Listing([a]), a)) is list


@pytest.mark.parametrize("value", [5, "text", None, 2.5, torch.float32, torch.Size((1, 2)), (1, 2), [3, "x"], {"a": 1}, ()])
def test_plain_arguments_stay(value: Any) -> None:
    noted = given(value)
    assert noted == value
    assert type(noted) is type(value)


def test_argument_that_cannot_be_compared_is_strange() -> None:
    a = tensor()
    for value in ({1}, Pair(a, 1), Pair(1, 2), Listing([1]), custom, iter([a])):
        assert given(value, a) is STRANGE
    assert given([custom], a) == [STRANGE]
    assert isinstance(given(np.arange(3)), np.ndarray)


# --- what is kept, and positions


def test_tensors_behind_the_last_attention_are_kept_only_if_asked() -> None:
    x = tensor(2, 2)
    for keep in (False, True):
        tracer = begun(x, keep=keep)
        first = call(tracer, torch.neg, x)
        call(tracer, torch.max, first, 1)
        assert tracer.kept == {}
        gate = attend(tracer, first, first, doubtful=True)
        call(tracer, torch.neg, first)
        assert sorted(tracer.kept) == ([4, 5] if keep else [])
        attended = attend(tracer, gate, gate)
        behind = call(tracer, torch.neg, attended)
        assert [(slot, id(one)) for slot, one in tracer.kept.items()] == ([(6, id(attended)), (7, id(behind))] if keep else [])
        tracer.close()
        assert len(tracer.kept) == (2 if keep else 0)
        tracer.release()
        assert tracer.kept == {}
    assert begun(x)._keep is False


def test_positions_of_packed_patches_are_copied() -> None:
    patches, rows = tensor(5, 12), torch.arange(10).reshape(5, 2)
    for packed, expected in ((((1, 1, 5),), [rows.tolist()]), ((), [])):
        tracer = begun(patches, packed=packed)
        call(tracer, torch.clone, rows)
        call(tracer, torch.neg, patches)
        assert [found.tolist() for found in tracer.tape.positions] == expected
        assert tracer.tape.packed == packed
    without = begun(packed=((1, 1, 5),))
    call(without, torch.clone, rows)
    assert without.tape.positions == []
