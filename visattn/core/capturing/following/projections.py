"""Output projections found on a tape: the linear layer that directly follows the heads of an attention call.

Starting from the result of the call, operations that only move elements are followed until a linear layer reads all heads of a
token, in the order of the heads. What follows it up to the residual connection may scale channels by a parameter (layer scale),
nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from visattn.core.capturing.following.tape_moves import MOVES, NOTHING, moved_by
from visattn.core.capturing.tokens.arrangement import Arrangement
from visattn.core.capturing.trace.operations import MULTIPLY, words
from visattn.core.capturing.trace.tape import Attention, Entry, Ref, Tape

_ADDS = words("add __add__ __radd__ __iadd__")


Used = Callable[[int], Tensor | None]  # takes the slot of a parameter; returns the tensor that this forward pass used


class Projection(NamedTuple):
    """Parameters of an output projection: slots of the weight `(D, heads * d)` and of factors of its result (layer scale)."""

    weight: int
    scales: tuple[int, ...]

    def of(self, used: Used) -> Tensor | None:
        """Return the weight with its factors as it is now; None if a parameter does not exist any longer."""
        parameters = [used(slot) for slot in (self.weight, *self.scales)]
        if any(parameter is None for parameter in parameters):
            return None
        weight, *scales = (parameter.detach() for parameter in parameters if parameter is not None)
        return reduce(lambda product, scale: product * scale.reshape(-1, 1), scales, weight)


class Projections:
    """Output projections of the attention calls on a complete tape; each is looked for once."""

    def __init__(self, tape: Tape) -> None:
        """Index the entries by the slots that they use."""
        self._found: dict[Attention, Projection | None] = {}
        self._uses: dict[int, list[int]] = {}
        self._numbers: dict[Attention, int] = {}
        for number, entry in enumerate(tape.entries):
            for slot in {ref.slot for ref in entry.refs}:
                self._uses.setdefault(slot, []).append(number)
            if entry.attention is not None:
                self._numbers[entry.attention] = number

    def weight(self, tape: Tape, attention: Attention, features: Callable[[], Tensor | None], used: Used) -> Tensor | None:
        """Return the `(D, heads * d)` weight that follows the heads of a call, with its layer scale; None if there is none.

        Args:
            tape: The tape that was indexed.
            attention: The call.
            features: Function that returns a tensor with the shape of the call's result. The value of each element is its feature,
                `head * d + channel`. It returns None if the result has no such order.
            used: Function that returns the parameters of this forward pass.
        """
        if attention not in self._found:
            start = features()
            self._found[attention] = None if start is None else _projection(tape, self._numbers[attention], start, self._uses)
        projection = self._found[attention]
        return None if projection is None else projection.of(used)


def features_of(arrangement: Arrangement, attention: Attention, channels: int) -> Tensor | None:
    """Return the feature `head * d + channel` of each element of a call's result `(*lead, q, d)`; None for attention in windows."""
    if arrangement.reason is not None or arrangement.query_index is not None:
        return None
    shape = *attention.lead, attention.rows, channels
    device = None if arrangement.order is None else arrangement.order.device
    position = torch.arange(math.prod(shape), device=device).view(shape)
    arranged = arrangement.take(position).cpu()  # (B, heads, q, d)
    if arranged.ndim != 4 or arranged.numel() != math.prod(shape):
        return None
    heads = arranged.shape[1]
    feature = torch.arange(heads * channels).view(heads, 1, channels).expand(arranged.shape)
    feature_by_position = torch.empty(arranged.numel(), dtype=torch.int64)
    feature_by_position[arranged.flatten()] = feature.flatten()
    return feature_by_position.view(shape)


def _projection(tape: Tape, number: int, features: Tensor, uses: Mapping[int, Sequence[int]]) -> Projection | None:
    """Follow the result of the attention call in entry `number` through a linear layer to the sum with the residual stream.

    `features` has the feature of each element of the result, and is moved with it. Return None if anything else happens to the
    result, or if the linear layer reads the features in another order. `uses` has the entries that use a slot.
    """
    attended = tape.entries[number].outs[0]
    if attended is None or features.shape != attended.shape:
        return None
    slot, weight, scales = attended.slot, None, list[int]()
    while True:
        next_number = _next_use(tape, slot, number, uses)
        if next_number is None:
            return None
        number = next_number
        entry = tape.entries[number]
        name, result = entry.operation.name, entry.outs[0] if entry.outs else None
        if not entry.operation.own or result is None:
            return None
        if name in _ADDS and weight is not None:  # the residual connection
            return Projection(weight, tuple(scales)) if len(entry.refs) == 2 else None
        if entry.writes or entry.contents:
            return None
        if name == "linear" and weight is None:
            weight = _weight(tape, entry, slot, features)
            if weight is None:
                return None
            features = torch.arange(result.shape[-1]).expand(result.shape)
        elif name in MULTIPLY and weight is not None:
            scale = _scale(tape, entry, slot, features)
            if scale is None:
                return None
            scales.append(scale)
        elif name in MOVES:
            moved = moved_by(entry, features, result.shape)
            if moved is None or moved.shape != result.shape:
                return None
            features = moved
        elif name not in NOTHING:
            return None
        slot = result.slot


def _next_use(tape: Tape, slot: int, number: int, uses: Mapping[int, Sequence[int]]) -> int | None:
    """Return the first entry behind entry `number` that uses a slot; None if there is none, or if others use it for something else.

    Entries that return the very tensor that they use, as `contiguous` may, are the same use.
    """
    later_uses = [user for user in uses.get(slot, ()) if user > number]
    for user in later_uses[:-1]:
        entry = tape.entries[user]
        result = entry.outs[0]
        if result is None or all(ref.slot != result.slot for ref in entry.refs):
            return None
    return later_uses[0] if later_uses else None


def _in_order(features: Tensor) -> bool:
    """Check whether the last axis of a tensor holds the features 0, 1, 2, ..."""
    return bool((features == torch.arange(features.shape[-1])).all())


def _weight(tape: Tape, entry: Entry, slot: int, features: Tensor) -> int | None:
    """Return the slot of the weight of a linear layer that reads the features of each token in their order."""
    arguments = [*entry.args, *entry.kwargs.values()]
    reads_slot = isinstance(arguments[0], Ref) and arguments[0].slot == slot
    if not reads_slot or len(arguments) < 2 or not isinstance(arguments[1], Ref) or not _in_order(features):
        return None
    weight = arguments[1].slot
    outside = tape.outside.get(weight)
    if outside is None or outside.kind != "parameter":
        return None
    return weight if outside.shape[1:] == features.shape[-1:] else None


def _scale(tape: Tape, entry: Entry, slot: int, features: Tensor) -> int | None:
    """Return the slot of the parameter that scales each channel, or all of them alike; None if the tensor is not scaled so."""
    factors = [ref.slot for ref in entry.refs if ref.slot != slot]
    outside = tape.outside.get(factors[0]) if len(factors) == 1 else None
    if outside is None or outside.kind != "parameter" or not _in_order(features):
        return None
    size = outside.shape.numel()
    is_vector = outside.shape[-1:].numel() == size  # apart from axes of size 1
    return factors[0] if is_vector and size in (1, features.shape[-1]) else None
