"""Tapes of forward passes: what an entry holds for comparison, which values are equal, and which tapes are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from visattn.core.capturing.forward import Inputs
from visattn.core.capturing.placing.nodes import Node
from visattn.core.capturing.placing.weak import Home
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.product_axes import Permuted
from visattn.core.capturing.trace.tape import (
    STRANGE,
    Attention,
    Entry,
    Made,
    Operand,
    Outside,
    Ref,
    Stored,
    Tape,
    Tapes,
    alike,
    plain,
    same_beginning,
)

SHAPE = torch.Size((2, 3))


def entry(*args: Any, func: Callable[..., Any] = torch.add, **kwargs: Any) -> Entry:
    return Entry(func, operation_of(func), args, kwargs, (Made(9, SHAPE, True),), "")


def slots(made: Entry) -> list[int]:
    return [ref.slot for ref in made.refs]


# --- arguments


def test_tensors_and_plain_values_are_compared_fast() -> None:
    shape = torch.Size((5, 7))
    made = entry(Ref(3), 2, "text", shape, alpha=Ref(1), beta=None)
    assert made.quick == ((3, None), (-1, 2), (-1, "text"), (-1, shape), (1, None), (-1, None))
    assert slots(made) == [3, 1]


@pytest.mark.parametrize("value", [(), (1, 2), [3, None], (True, 5), (slice(None), 0), (..., slice(1, 5, 2), None)])
def test_lists_of_numbers_and_slices_are_compared_fast(value: Any) -> None:
    assert entry(Ref(0), value).quick == ((0, None), (-2, value))


def test_slices_are_compared_fast() -> None:
    assert entry(Ref(0), slice(1, None, 2)).quick == ((0, None), (-1, slice(1, None, 2)))


@pytest.mark.parametrize(
    "value", [(1, 2.0), ("text",), [1, (2,)], {"a": 1}, slice(1.0, 2), slice(True), STRANGE, {1, 2}, np.zeros(2)]
)
def test_other_values_are_not_compared_fast(value: Any) -> None:
    made = entry(Ref(4), value)
    assert made.quick is None
    assert slots(made) == [4]


def test_tensors_in_nested_arguments_are_found_in_order() -> None:
    nested = entry([Ref(5), (Ref(2), 1)], {"a": Ref(7)}, slice(Ref(1), None, Ref(8)), out=(Ref(0),))
    assert slots(nested) == [5, 2, 7, 1, 8, 0]
    assert nested.quick is None
    assert slots(entry(slice(None, Ref(6), None))) == [6]


def test_entry_descends_from_its_tensors() -> None:
    made = entry(Ref(3), [Ref(5)])
    assert made.descends_from({5, 8})
    assert made.descends_from({3})
    assert not made.descends_from({4, 8})
    assert not entry(1).descends_from({0, 1})


# --- which calls may run again, and which return one tensor


def step(**facts: Any) -> Any:
    return SimpleNamespace(**({"op": torch.ops.aten.add, "written": (), "random": False} | facts))


def test_pure_call_may_be_repeated() -> None:
    assert entry(Ref(0)).may_be_repeated
    pure = entry(Ref(0))
    pure.steps = (step(), step())
    assert pure.may_be_repeated


@pytest.mark.parametrize("facts", [{"op": None}, {"written": (1,)}, {"random": True}])
def test_call_with_an_impure_step_may_not_be_repeated(facts: Mapping[str, Any]) -> None:
    made = entry(Ref(0))
    made.steps = (step(), step(**facts))
    assert not made.may_be_repeated


def test_call_that_writes_or_reads_contents_may_not_be_repeated() -> None:
    for change in ({"writes": True}, {"contents": {3: torch.zeros(2)}}):
        made = entry(Ref(0))
        for name, value in change.items():
            setattr(made, name, value)
        assert not made.may_be_repeated
    assert not entry(Ref(0), func=Tensor.unsqueeze_).may_be_repeated
    assert not entry(Ref(0), func=lambda x: x).may_be_repeated


def shapes_of(out: Any, *overwritten: Tensor, **changes: Any) -> Any:
    made = entry(Ref(3), 2)
    made.before = (None,)
    for name, value in changes.items():
        setattr(made, name, value)
    return made.simple_shapes(out, overwritten)


def test_call_that_returns_new_tensors_or_arguments_is_simple() -> None:
    out = torch.zeros(2, 3)
    assert shapes_of(out) == shapes_of(out, before=(3,)) == (SHAPE,)
    assert shapes_of(out, before=(4,)) is None
    assert (
        shapes_of((out, torch.zeros(5)), before=(None, 3)) == shapes_of([out, torch.zeros(5)], before=(3, None)) == (SHAPE, (5,))
    )
    assert shapes_of((out, out), before=(None, 4)) is None


def test_call_that_overwrites_only_what_it_returns_is_simple() -> None:
    out, other = torch.zeros(2, 3), torch.zeros(2, 3)
    assert shapes_of(out, out, before=(3,), writes=True) == (SHAPE,)
    assert shapes_of(out, other, writes=True) is shapes_of(out, out, other, writes=True) is None
    assert shapes_of((out,), other, writes=True) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"quick": None},
        {"contents": {3: torch.zeros(2)}},
        {"operation": operation_of(torch.add)._replace(own=False)},
        {"func": Tensor.T.__get__},  # type: ignore[attr-defined]
    ],
)
def test_call_that_does_more_than_return_tensors_is_told_apart(changes: Mapping[str, Any]) -> None:
    assert shapes_of(torch.zeros(2, 3), **changes) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_call_that_returns_other_than_plain_tensors_is_told_apart() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    largest = torch.zeros(2, 3).max(1)  # a tuple with names
    for out in (nn.Parameter(torch.zeros(1)), nested, largest, None, 3, (torch.zeros(1), None), {"a": torch.zeros(1)}):
        assert shapes_of(out) is None


# --- equal values


@pytest.mark.parametrize(
    ("given", "known", "expected"),
    [
        (1, 1, True),
        (1, 2, False),
        (1, True, False),
        (1.0, 1, False),
        ("a", "a", True),
        (torch.float32, torch.float32, True),
        (None, None, True),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(3) + 1, False),
        (np.arange(3.0), np.arange(3), False),
        (np.int64(3), np.array(3), True),
        ([0, 1, 2], np.arange(3), False),
        (STRANGE, STRANGE, False),
        ({1}, {1}, False),
    ],
)
def test_values_are_alike_if_type_and_content_agree(given: Any, known: Any, expected: bool) -> None:
    assert alike(given, known) is expected


def test_values_are_stored_in_a_form_that_can_be_compared() -> None:
    assert plain(5) == 5
    assert plain("text") == "text"
    array = np.arange(3)
    stored = plain(array)
    array[0] = 7
    assert stored.tolist() == [0, 1, 2]
    assert isinstance(plain(np.float32(2)), np.ndarray)
    assert plain({1}) is STRANGE
    assert plain([1]) is STRANGE


# --- tapes


def test_facts_that_are_not_given_have_their_defaults() -> None:
    made, whole = entry(), Tape()
    assert (made.writes, made.rewritten, made.contents, made.kernels, made.points) == (False, (), {}, (), ())
    assert (made.choice, made.attention, made.shapes, made.before) == (None, None, None, ())
    assert (made.scoring, made.kept, made.steps) == (False, False, ())
    assert whole.dynamic is False
    assert whole.whole is True
    assert (whole.output, whole.packed, whole.device) == ((), (), torch.device("cpu"))
    attention = Attention("a", 0, 0, (), True, (2,), 5, 7)
    assert attention.answers_at_keys is False
    assert attention.doubtful is False
    assert (attention.position, attention.scores, attention.samples, attention.softmaxes) == (None, None, (), frozenset())
    assert Outside("pixels", "", SHAPE, True).home is Stored("buffer", "b").home is None
    assert Inputs() == ((0, 0), 0)
    assert (Operand(2).groups, Operand(2).axes, Operand(2).weighs) == (1, None, False)


def test_facts_of_the_tape_are_not_changed_by_those_that_hold_it() -> None:
    attention = Attention("a", 0, 0, (), True, (2,), 5, 7)
    with pytest.raises(AttributeError):
        attention.layer = "b"  # type: ignore[misc]
    assert attention != replace(attention)
    made = entry(5)
    assert made not in (entry(5), replace(made, args=made.args))
    assert len({made, made}) == 1
    with pytest.raises(AttributeError):
        made.other = 1  # type: ignore[attr-defined]
    assert Tape() != Tape()


def test_operand_is_seen_with_the_axes_of_its_call() -> None:
    tensor = torch.arange(2 * 3 * 5 * 4).reshape(2, 3, 5, 4)
    assert Operand(0).view(tensor) is tensor
    assert torch.equal(Operand(0, 2).view(tensor), tensor[:, [0, 0, 1, 1, 2, 2]])
    axes = Permuted((0, 1, 3, 2), (0, 2, 1, 3), (0, 1, 2, 3))
    assert torch.equal(Operand(0, axes=axes, weighs=True).view(tensor), tensor.mT)
    assert torch.equal(Operand(0, axes=axes).view(tensor), tensor.transpose(1, 2))


def test_beginning_of_a_tape_has_the_entries_and_slots_before_the_cut() -> None:
    entries = [entry(Ref(number)) for number in range(4)]
    outside = {slot: Outside("parameter", str(slot), SHAPE, True) for slot in range(5)}
    many = {slot: frozenset({slot}) for slot in range(5)}
    whole = Tape(entries, outside, set(range(5)), dict(many), dict(many), nodes={slot: Node(slot + 10) for slot in range(5)})
    whole.packed, whole.device, whole.output = ((1, 2, 3),), torch.device("meta"), (4,)
    begun = whole.beginning(2, 3)
    assert begun.entries == entries[:2]
    assert list(begun.outside) == list(begun.weights) == list(begun.logarithms) == list(begun.nodes) == [0, 1, 2]
    assert begun.descends == {0, 1, 2}
    assert (begun.packed, begun.device, begun.output) == (((1, 2, 3),), torch.device("meta"), ())
    assert begun.nodes[2] == 12
    begun.entries.append(entries[3])
    assert whole.entries == entries


def tape_of(*outside: Outside, packed: tuple[tuple[int, ...], ...] = (), device: str = "cpu") -> Tape:
    return Tape(outside=dict(enumerate(outside)), packed=packed, device=torch.device(device))


PIXELS, MASK = Outside("pixels", "", SHAPE, True), Outside("input", "mask", SHAPE, False)


def test_forward_passes_with_the_same_inputs_begin_alike() -> None:
    weight = Outside("parameter", "weight", SHAPE, True)
    known = tape_of(PIXELS, weight, MASK)
    assert same_beginning(known, tape_of(PIXELS, MASK))
    assert same_beginning(known, tape_of(PIXELS, MASK._replace(home=Home(nn.Identity(), "", "mask"))))
    assert not same_beginning(known, tape_of(PIXELS))
    assert not same_beginning(known, tape_of(MASK, PIXELS))
    for change in ({"kind": "pixels"}, {"name": "other"}, {"shape": torch.Size((3, 2))}, {"floating": True}):
        assert not same_beginning(known, tape_of(PIXELS, MASK._replace(**change)))
    assert not same_beginning(known, tape_of(PIXELS, MASK, packed=((1, 2, 3),)))
    assert not same_beginning(known, tape_of(PIXELS, MASK, device="meta"))
    assert not same_beginning(known, tape_of(PIXELS, MASK, packed=((1, 2, 3),), device="meta"))


def test_latest_eight_tapes_of_a_model_are_kept() -> None:
    kept, model, other = Tapes(), nn.Identity(), nn.Identity()
    made = [Tape() for _ in range(9)]
    assert kept.of(model) == []
    for tape in made[:8]:
        kept.keep(model, tape)
    assert kept.of(model) == made[7::-1]
    kept.keep(model, made[8])
    assert kept.of(model) == made[8:0:-1]
    kept.keep(model, made[5])
    assert kept.of(model) == [made[number] for number in (5, 8, 7, 6, 4, 3, 2, 1)]
    assert kept.of(other) == []
    kept.clear()
    assert kept.of(model) == []
