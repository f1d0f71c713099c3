"""Values that an entry notes because they decide where tokens lie: indices and masks, kernels of convolutions, and points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from visattn.core.capturing.placing.kernels import UNKNOWN, Kernel, Kind
from visattn.core.capturing.placing.nodes import Facts, Node
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.trace.deciding import note_values
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.tape import Entry, Ref, Tape

CENTERED = Kernel(centered=True)


def decided(
    func: Callable[..., Any], *args: Any, of_image: Sequence[int] = (0,), strangers: Sequence[int] = (), **kwargs: Any
) -> dict[int, Tensor]:
    """Return the contents of a call whose tensors have slots in their order; those in `of_image` depend on the image.

    The tape does not know the tensors at the positions `strangers`.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]

    def slot_of(tensor: Tensor) -> int | None:
        slot = next(number for number, other in enumerate(tensors) if other is tensor)
        return None if slot in strangers else slot

    def noted(value: Any) -> Any:
        return Ref(next(n for n, other in enumerate(tensors) if other is value)) if isinstance(value, Tensor) else value

    named = {name: noted(value) for name, value in kwargs.items()}
    entry = Entry(func, operation_of(func), tuple(noted(value) for value in args), named, (), "")
    note_values(Tape(descends=set(of_image)), entry, args, kwargs, slot_of)
    return dict(entry.contents)


def custom(*_: Any) -> None:
    """Stand for a function of other code."""


# --- indices and masks


def test_index_of_a_read_is_noted_but_not_what_it_reads() -> None:
    counts, index = torch.arange(6), torch.tensor([4, 1])
    assert {slot: found.tolist() for slot, found in decided(torch.take, counts, index).items()} == {1: [4, 1]}
    assert {slot: found.tolist() for slot, found in decided(torch.gather, counts, 0, index=index).items()} == {1: [4, 1]}
    assert decided(Tensor.__getitem__, counts, 3) == {}


def test_all_whole_numbers_of_a_write_or_of_other_code_are_noted() -> None:
    counts, index, values = torch.arange(6), torch.tensor([True, False]), torch.ones(2)
    for func in (Tensor.__setitem__, Tensor.masked_scatter, custom):
        assert sorted(decided(func, counts, index, values)) == [0, 1]


def test_noted_index_is_a_copy() -> None:
    index = torch.tensor([4, 1])
    noted = decided(torch.take, torch.arange(6), index)
    index.fill_(0)
    assert noted[1].tolist() == [4, 1]


def test_only_calls_that_choose_by_what_comes_from_the_image_note_indices() -> None:
    counts, index = torch.arange(6), torch.tensor([4, 1])
    assert decided(torch.add, counts, index) == {}
    assert decided(torch.take, counts, index, of_image=()) == {}
    assert decided(custom, counts, index, of_image=()) == {}
    assert list(decided(torch.take, counts, index, of_image=(1,))) == [1]


def test_index_that_the_tape_does_not_know_is_not_noted() -> None:
    counts, index, other = torch.arange(6), torch.tensor([4, 1]), torch.tensor([2, 2])
    assert list(decided(custom, counts, index, other, strangers=(1,))) == [0, 2]


# --- kernels


def convolution(weight: int | None, kernel: Kernel | None = CENTERED, **given: Any) -> Step:
    """Return a step with the weight at a node; without one it is another operation."""
    arguments = {} if weight is None else {"weight": Node(weight), "stride": [1, 1], "padding": [1, 1]}
    return Step(torch.ops.aten.convolution.default, arguments | given, kernel=kernel if weight is not None else None)


def kernels(
    steps: Sequence[Step], slots: Sequence[int], shapes: Sequence[Sequence[int]], of_image: Sequence[int] = (0,), known: int = 9
) -> tuple[tuple[int, Kind, Kernel], ...]:
    """Return the kernels that a call with tensors in these slots notes.

    The tensor in slot `s` is node `s + 10`, if `s` is less than `known`; `shapes` are those of the nodes from 10 on.
    """
    facts = [Facts(torch.Size(shape), (), 0, 0, True, True) for shape in ([()] * 10 + list(shapes))]
    tape = Tape(facts=facts, nodes={slot: Node(slot + 10) for slot in range(known)}, descends=set(of_image))
    entry = Entry(torch.conv2d, operation_of(torch.conv2d), tuple(map(Ref, slots)), {}, (), "", steps=tuple(steps))
    note_values(tape, entry, (), {}, lambda _: None)
    return entry.kernels


MAPS, WEIGHT = (2, 4, 8, 8), (5, 4, 3, 3)
ONE_STEP = Kind((1, 1), (1, 1), (1.0, 1.0))  # taps are one cell apart, cells keep their size, the center is the second tap


def test_kernel_is_noted_with_its_slot_and_use() -> None:
    step = convolution(11)
    assert kernels([convolution(None), step], (0, 1, 2), (MAPS, WEIGHT, (5,))) == ((1, ONE_STEP, CENTERED),)
    assert step.kernel == CENTERED


def test_each_convolution_of_a_call_has_its_kernel() -> None:
    leaning = Kernel(centered=False, tap=(0, 2))
    steps = [convolution(12), convolution(None), convolution(11, leaning, stride=[2, 2])]
    found = kernels(steps, (0, 1, 2), (MAPS, WEIGHT, (4, 4, 3, 3)))
    assert found == ((2, ONE_STEP, CENTERED), (1, Kind((1, 1), (2, 2), (1.5, 1.5)), leaning))


def test_copied_weight_is_found_by_its_shape_among_learned_tensors() -> None:
    shapes = (WEIGHT, WEIGHT, (5,), WEIGHT)
    assert kernels([convolution(13)], (0, 1, 2), shapes) == ((1, ONE_STEP, CENTERED),)


@pytest.mark.parametrize(
    ("slots", "shapes", "of_image"),
    [
        ((0, 2), (MAPS, WEIGHT, (5,), WEIGHT), (0,)),  # no tensor of this shape
        ((0, 1), (MAPS, WEIGHT, (5,), WEIGHT), (0, 1)),  # it comes from the image
        ((0, 1, 2), (MAPS, WEIGHT, WEIGHT, WEIGHT), (0,)),  # two of this shape
    ],
)
def test_weight_that_is_not_found_is_unknown(slots: Sequence[int], shapes: Any, of_image: Sequence[int]) -> None:
    step = convolution(13)
    assert kernels([step], slots, shapes, of_image) == ()
    assert step.kernel is UNKNOWN


def test_weight_of_an_argument_without_a_number_is_unknown() -> None:
    step = convolution(11)
    assert kernels([step], (0, 1), (MAPS, WEIGHT), known=1) == ()
    assert step.kernel is UNKNOWN


def test_weight_whose_values_do_not_matter_is_not_noted() -> None:
    step = convolution(11, stride=[3, 3], padding=[0, 0])
    assert kernels([step], (0, 1), (MAPS, WEIGHT)) == ()
    assert step.kernel is UNKNOWN


# --- points


def sampling(*steps: Step, slots: Sequence[int] = (3, 4)) -> Entry:
    """Return a call with tensors in these slots, of which the tape knows 3, 4 and 5 as nodes 30, 40 and 50."""
    entry = Entry(torch.grid_sampler, operation_of(torch.grid_sampler), tuple(map(Ref, slots)), {}, (), "", steps=steps)
    note_values(Tape(nodes={slot: Node(10 * slot) for slot in (3, 4, 5)}), entry, (), {}, lambda _: None)
    return entry


def reading(node: int | None, points: Tensor | None) -> Step:
    given = {"input": Node(30)} | ({} if node is None else {"grid": Node(node)})
    return Step(torch.ops.aten.grid_sampler_2d.default, given, contents={} if points is None else {"grid": points})


def test_points_are_noted_with_their_slot() -> None:
    step, points = reading(40, torch.zeros(1, 2, 2, 2)), torch.zeros(1, 2, 2, 2)
    entry = sampling(step)
    ((slot, found),) = entry.points
    assert slot == 4
    assert found is step.points
    assert found is not None
    assert found.fits(points)
    assert step.contents == {}
    assert entry.quick is None


def test_points_of_several_steps_keep_their_order() -> None:
    steps = reading(50, torch.zeros(1)), reading(40, torch.zeros(1))
    entry = sampling(*steps, slots=(3, 4, 5))
    assert [slot for slot, _ in entry.points] == [5, 4]
    assert [points for _, points in entry.points] == [step.points for step in steps]


@pytest.mark.parametrize("step", [reading(50, torch.zeros(1)), reading(40, None), reading(None, None)])
def test_points_that_are_no_argument_or_have_no_values_are_not_noted(step: Step) -> None:
    entry = sampling(step, slots=(3, 4, 6))
    assert entry.points == ()
    assert step.points is None
    assert entry.quick == ((3, None), (4, None), (6, None))
