"""Output projections found on a tape: the linear layer that directly follows the heads of an attention call.

Starting from the result of the call, operations that only move elements are followed until a linear layer reads all heads of a token,
in the order of the heads. What follows it up to the residual connection may scale channels by a parameter (layer scale), nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from visattn.capturing.following.moves import MOVES, NOTHING, moved_by
from visattn.capturing.tokens.arrangement import Arrangement
from visattn.capturing.trace.operations import words
from visattn.capturing.trace.tape import Attention, Entry, Ref, Tape

_SCALES = words("mul multiply __mul__ __rmul__ __imul__")
_ADDS = words("add __add__ __radd__ __iadd__")


Used = Callable[[int], Tensor | None]  # takes the slot of a parameter; returns the tensor that this forward pass used


class Projection(NamedTuple):
    """Parameters of an output projection: slots of the weight `(D, heads * d)`, and of factors of its result `(D,)` (layer scale)."""

    weight: int
    scales: tuple[int, ...]

    def of(self, used: Used) -> Tensor | None:
        """Return the weight with its factors as it is now; None if a parameter does not exist any longer."""
        found = [used(slot) for slot in (self.weight, *self.scales)]
        if any(tensor is None for tensor in found):
            return None
        weight, *scales = (tensor.detach() for tensor in found if tensor is not None)
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
            self._found[attention] = None if start is None else _found(tape, self._numbers[attention], start, self._uses)
        found = self._found[attention]
        return None if found is None else found.of(used)


def features_of(arrangement: Arrangement, attention: Attention, channels: int) -> Tensor | None:
    """Return the feature `head * d + channel` of each element of a call's result `(*lead, q, d)`; None for attention within windows."""
    if arrangement.reason is not None or arrangement.query_index is not None:
        return None
    shape = *attention.lead, attention.rows, channels
    device = None if arrangement.order is None else arrangement.order.device
    place = arrangement.take(torch.arange(math.prod(shape), device=device).view(shape)).cpu()  # (B, heads, q, d)
    if place.ndim != 4 or place.numel() != math.prod(shape):
        return None
    feature = torch.arange(place.shape[1] * channels).view(place.shape[1], 1, channels).expand(place.shape)
    found = torch.empty(place.numel(), dtype=torch.int64)
    found[place.flatten()] = feature.flatten()
    return found.view(shape)


def _found(tape: Tape, number: int, features: Tensor, uses: Mapping[int, Sequence[int]]) -> Projection | None:
    """Follow the result of the call in entry `number` to the residual connection."""
    made = tape.entries[number].outs[0]
    if made is None or features.shape != made.shape:
        return None
    slot, weight, scales = made.slot, None, []
    while True:
        following = [at for at in uses.get(slot, ()) if at > number]
        if len(following) != 1 and not _all_alike(tape, following):
            return None
        number = following[0]
        entry = tape.entries[number]
        name, result = entry.operation.name, entry.outs[0] if entry.outs else None
        if not entry.operation.own or result is None:
            return None
        if name in _ADDS and weight is not None:
            return Projection(weight, tuple(scales)) if len(entry.refs) == 2 else None
        if entry.writes or entry.contents:
            return None
        if name == "linear" and weight is None:
            weight = _weight(tape, entry, slot, features)
            if weight is None:
                return None
            features = torch.arange(result.shape[-1]).expand(result.shape)
        elif name in _SCALES and weight is not None:
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


def _all_alike(tape: Tape, following: Sequence[int]) -> bool:
    """Check whether all entries but the last return the very tensor that they use, as `contiguous` may."""
    return bool(following) and all(
        (made := tape.entries[at].outs[0]) is not None and any(ref.slot == made.slot for ref in tape.entries[at].refs)
        for at in following[:-1]
    )


def _in_order(features: Tensor) -> bool:
    return bool((features == torch.arange(features.shape[-1])).all())


def _weight(tape: Tape, entry: Entry, slot: int, features: Tensor) -> int | None:
    """Return the slot of the weight of a linear layer that reads the features of each token in their order."""
    given = [*entry.args, *entry.kwargs.values()]
    reads = isinstance(given[0], Ref) and given[0].slot == slot and len(given) > 1 and isinstance(given[1], Ref)
    if not reads or not _in_order(features):
        return None
    known = tape.outside.get(given[1].slot)
    fits = known is not None and known.kind == "parameter" and known.shape[1:] == features.shape[-1:]
    return given[1].slot if fits else None


def _scale(tape: Tape, entry: Entry, slot: int, features: Tensor) -> int | None:
    """Return the slot of the parameter that scales each channel, or all of them alike."""
    others = [ref.slot for ref in entry.refs if ref.slot != slot]
    known = tape.outside.get(others[0]) if len(others) == 1 else None
    if known is None or known.kind != "parameter" or not _in_order(features):
        return None
    return (
        others[0] if known.shape.numel() in (1, features.shape[-1]) and known.shape[-1:].numel() == known.shape.numel() else None
    )
