"""Factors on a tape: tensors that are bounded by a sigmoid or the like, and only moved, added, scaled or resized since."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

import torch

from visattn.core.capturing.trace.operations import MULTIPLY, SQUASH, words
from visattn.core.capturing.trace.tape import Entry, Ref, Tape

_CLIPS = words("relu6 hardtanh clamp clip")
_DIVIDE = words("div divide true_divide __truediv__ __itruediv__")
_WHOLE = words("""
    view view_as reshape reshape_as flatten unflatten permute transpose swapaxes swapdims movedim moveaxis T mT t squeeze unsqueeze expand
    expand_as broadcast_to repeat tile repeat_interleave contiguous clone detach to float half bfloat16 double type type_as dropout
    dropout2d feature_dropout
""")
_PARTS = words("__getitem__ select narrow chunk split tensor_split unbind cat concat concatenate stack")
_SCALE = (
    MULTIPLY | _DIVIDE | words("add __add__ __radd__ __iadd__ sub subtract __sub__ __rsub__ __isub__ rsub neg negative __neg__")
)
_RESIZE = words("mean sum interpolate upsample upsample_bilinear upsample_nearest avg_pool2d adaptive_avg_pool2d")
_LINEAR = _WHOLE | _PARTS | _SCALE | _RESIZE
_BOUNDED, _SIGNED, _CLIPPED = 2, 1, 0


class Factor(NamedTuple):
    """Tensor that may be a gate.

    Attributes:
        squashes: Numbers of the entries that bound it, such as a sigmoid, or several whose results were added.
        strength: 2: by a sigmoid, or clipped to `[0, 1]`; 1: by tanh; 0: clipped to other bounds, and not scaled yet.
    """

    squashes: frozenset[int]
    strength: int


class Sources:
    """Entries of a tape by what they made, and what that was computed from.

    Attributes:
        tape: The tape.
    """

    def __init__(self, tape: Tape) -> None:
        """Start before the first entry."""
        self.tape = tape
        self._numbers: dict[int, int] = {}
        self._factors: dict[int, Factor | None] = {}
        self._count = 0

    def number(self, slot: int) -> int | None:
        """Return the number of the entry that made the tensor in a slot; None for a tensor that no entry made."""
        entries = self.tape.entries
        for number in range(self._count, len(entries)):
            made = [result.slot for result in entries[number].outs if result is not None]
            self._numbers.update(dict.fromkeys((*made, *(after for _, after in entries[number].rewritten)), number))
        self._count = len(entries)
        return self._numbers.get(slot)

    def factor(self, slot: int) -> Factor | None:
        """Return how the tensor in a slot is bounded, if it is computed from the image; None if it is not."""
        if slot not in self._factors:
            number = self.number(slot)
            has_source = number is not None and slot in self.tape.descends
            self._factors[slot] = self._factor_of(number) if has_source and number is not None else None
        return self._factors[slot]

    def _factor_of(self, number: int) -> Factor | None:
        """Return how the result of an entry is bounded: by itself, or as its arguments are."""
        entry = self.tape.entries[number]
        name = entry.operation.name if entry.operation.own else ""
        if name in SQUASH:
            strength = _strength(name, entry)
            return None if strength is None else Factor(frozenset({number}), strength)
        images = sorted(
            _read(entry) & self.tape.descends, reverse=True
        )  # the latest first: of a residual sum, that of the branch
        divides_by_image = name in _DIVIDE and len(images) > 1
        if name not in _LINEAR or divides_by_image or entry.rewritten:
            return None
        factors = [part for part in takewhile(bool, map(self.factor, images)) if part is not None]
        if len(factors) < len(images) or not factors:
            return None
        strength = min(factor.strength for factor in factors)
        is_scaled = name in MULTIPLY | _DIVIDE and len(images) == 1
        squashes = frozenset[int]().union(*(factor.squashes for factor in factors))
        return Factor(squashes, _BOUNDED if is_scaled and strength == _CLIPPED else strength)

    def behind(self, slot: int) -> set[int]:
        """Return the slots of all tensors that the one in a slot was computed from, with itself."""
        return self._collected(slot, lambda _: True)[0]

    def roots(self, slot: int) -> set[int]:
        """Return the slots of the tensors that the one in a slot was computed from element by element.

        Elements stay at their places, so a part of a tensor, such as a half of its channels, is a root of its own.
        """
        return self._collected(slot, _is_pointwise)[1]

    def views(self, slot: int) -> set[int]:
        """Return the slots of the tensors that the one in a slot is a whole view or copy of, with itself."""
        return self._collected(slot, lambda entry: entry.operation.own and entry.operation.name in _WHOLE)[0]

    def smallest(self, slot: int) -> int:
        """Return the least number of elements among the tensors that the one in a slot is a whole copy of, scaled by constants or not."""

        def copies(entry: Entry) -> bool:
            scales = entry.operation.name in _SCALE and len(_read(entry) & self.tape.descends) == 1
            return entry.operation.own and (scales or entry.operation.name in _WHOLE)

        return min(self.tape.facts[self.tape.nodes[copy]].shape.numel() for copy in self._collected(slot, copies)[0])

    def _collected(self, slot: int, passes: Callable[[Entry], bool]) -> tuple[set[int], set[int]]:
        """Return the slots met when a slot is followed to its sources, through entries that `passes` accepts, and those where it ended."""
        met, ends, waiting = {slot}, set[int](), [slot]
        while waiting:
            reached = waiting.pop()
            number = self.number(reached)
            entry = None if number is None else self.tape.entries[number]
            befores = _read(entry) & self.tape.descends if entry is not None and passes(entry) else set[int]()
            if not befores:
                ends.add(reached)
            waiting += befores - met
            met |= befores
        return met, ends


def _strength(name: str, entry: Entry) -> int | None:
    """Return the strength of a factor that an entry has bounded; None if it has bounded one side only."""
    if name not in _CLIPS:
        return _SIGNED if name == "tanh" else _BOUNDED
    bounds = [value for value in (*entry.args[1:], *entry.kwargs.values()) if type(value) in (int, float)]
    if len(bounds) < 2 and name in ("clamp", "clip"):
        return None
    return _BOUNDED if bounds == [0, 1] else _CLIPPED


def _read(entry: Entry) -> set[int]:
    """Return the slots of the tensors whose elements an entry reads; of `expand_as` and the like, those of the first one."""
    is_like_another = entry.operation.own and entry.operation.name.endswith("_as")
    return {ref.slot for ref in (entry.refs[:1] if is_like_another else entry.refs)}


def _is_pointwise(entry: Entry) -> bool:
    """Check whether an entry computes each element from the same elements of its arguments, or only views them."""
    if not entry.operation.own or entry.rewritten:
        return False
    is_tagged = bool(entry.steps) and all(step.op is not None and torch.Tag.pointwise in step.op.tags for step in entry.steps)
    return is_tagged or entry.operation.name in _WHOLE | {"batch_norm"}


def operands(entry: Entry) -> tuple[Ref, ...]:
    """Return the two factors of an elementwise product or an einsum; none for any other entry."""
    is_product = entry.operation.own and entry.operation.name in MULTIPLY | {"einsum"}
    return entry.refs[:2] if is_product and len(entry.refs) >= 2 else ()
