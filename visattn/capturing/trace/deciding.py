"""Values that decide places: kernels, points, and indices and masks that come from the image. They are noted with the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from visattn.capturing.placing.kernels import UNKNOWN, Kernel, Kind, kind_of
from visattn.capturing.tokens.points import POINTS, Points
from visattn.capturing.trace.arguments import tensors_in
from visattn.capturing.trace.operations import CHOOSE, READ
from visattn.capturing.trace.tape import Entry, Tape


def note_values(
    tape: Tape,
    entry: Entry,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    slot_of: Callable[[Tensor], int | None],
) -> None:
    """Note the values that decide places, before the call's results are added to the tape."""
    entry.kernels = _kernels(tape, entry)
    _note_points(tape, entry)
    if entry.descends_from(tape.descends) and (entry.operation.name in CHOOSE or not entry.operation.own):
        choosing = args[1:] if entry.operation.name in READ else args
        entry.contents = {
            slot: tensor.detach().clone()
            for tensor in tensors_in((choosing, kwargs))
            if not tensor.is_floating_point() and (slot := slot_of(tensor)) is not None
        }


def _kernels(tape: Tape, entry: Entry) -> tuple[tuple[int, Kind, Kernel], ...]:
    """Return the arguments of a call that are kernels of its convolutions; a kernel that is no argument counts as unknown."""
    found, nodes = [], {ref.slot: tape.nodes[ref.slot] for ref in entry.refs if ref.slot in tape.nodes}
    for step in entry.steps:
        if step.kernel is None:
            continue
        weight, shape = step.given["weight"], tape.facts[step.given["weight"]].shape
        same = [slot for slot, node in nodes.items() if node == weight]
        same = same or [
            slot for slot, node in nodes.items() if tape.facts[node].shape == shape and slot not in tape.descends
        ]  # a copy in another type
        kind = kind_of(shape[2:], step.given)
        if kind is not None and len(same) == 1:
            found.append((same[0], kind, step.kernel))
        else:
            step.kernel = UNKNOWN
    return tuple(found)


def _note_points(tape: Tape, entry: Entry) -> None:
    """Keep the points at which a call reads values until they are measured."""
    for step in entry.steps:
        points, node = step.contents.pop(POINTS, None), step.given.get(POINTS)
        slot = next((ref.slot for ref in entry.refs if tape.nodes.get(ref.slot) == node), None)
        if points is not None and slot is not None:
            step.points = Points(points)
            entry.points, entry.quick = (*entry.points, (slot, step.points)), None
