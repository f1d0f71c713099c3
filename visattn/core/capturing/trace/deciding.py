"""Values that decide places: kernels, points, and indices and masks that come from the image. They are noted with the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from visattn.core.capturing.placing.kernels import UNKNOWN, Kernel, Kind, kind_of
from visattn.core.capturing.tokens.points import POINTS, Points
from visattn.core.capturing.trace.call_tensors import tensors_in
from visattn.core.capturing.trace.operations import CHOOSE, READ
from visattn.core.capturing.trace.tape import Entry, Tape


def note_values(
    tape: Tape,
    entry: Entry,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    slot_of: Callable[[Tensor], int | None],
) -> None:
    """Note in an entry those values of its arguments that decide where tokens lie, before its results are added to the tape.

    These are kernels of convolutions, points at which values are sampled, and index tensors and masks that come from the image.
    """
    entry.kernels = _noted_kernels(tape, entry)
    _note_points(tape, entry)
    may_choose = entry.operation.name in CHOOSE or not entry.operation.own
    if entry.descends_from(tape.descends) and may_choose:
        may_be_indices = args[1:] if entry.operation.name in READ else args  # the first argument is read, as in `tokens[index]`
        entry.contents = {
            slot: tensor.detach().clone()
            for tensor in tensors_in((may_be_indices, kwargs))
            if not tensor.is_floating_point() and (slot := slot_of(tensor)) is not None
        }


def _noted_kernels(tape: Tape, entry: Entry) -> tuple[tuple[int, Kind, Kernel], ...]:
    """Return the slots (numbers on the tape) of the arguments that are weights of a call's convolutions, and how they read cells.

    The next forward pass measures them again. A weight that is no argument of the call cannot be found there; it becomes unknown.
    """
    kernels = []
    nodes = {ref.slot: tape.nodes[ref.slot] for ref in entry.refs if ref.slot in tape.nodes}
    for step in entry.steps:
        if step.kernel is None:
            continue
        weight = step.given["weight"]
        shape = tape.facts[weight].shape
        slots = [slot for slot, node in nodes.items() if node == weight]
        if not slots:  # the weight may be a copy of an argument in another dtype
            slots = [slot for slot, node in nodes.items() if tape.facts[node].shape == shape and slot not in tape.descends]
        kind = kind_of(shape[2:], step.given)
        if kind is not None and len(slots) == 1:
            kernels.append((slots[0], kind, step.kernel))
        else:
            step.kernel = UNKNOWN
    return tuple(kernels)


def _note_points(tape: Tape, entry: Entry) -> None:
    """Note in an entry the points at which it samples values, as `grid_sample` does; each forward pass measures them."""
    for step in entry.steps:
        points, points_node = step.contents.pop(POINTS, None), step.given.get(POINTS)
        slot = next((ref.slot for ref in entry.refs if tape.nodes.get(ref.slot) == points_node), None)
        if points is not None and slot is not None:
            step.points = Points(points)
            entry.points = (*entry.points, (slot, step.points))
            entry.quick = None  # the fast comparison does not look at points
