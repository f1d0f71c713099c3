"""Operands of products that a model writes out, kept until a later operation has turned out to be attention.

These are queries and keys, before the softmax over their product; factors that are multiplied elementwise, before the sum; and maps
with the points at which they are sampled, before the samples are weighted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from visattn.core.capturing.intercept.written_out import BETWEEN, PRODUCT, tensors_of
from visattn.core.capturing.trace.operations import JOIN, words
from visattn.core.capturing.trace.tape import Entry, Tape
from visattn.core.capturing.trace.tracer import Tracer

SCORING = PRODUCT | {"baddbmm", "einsum"}
_MULTIPLY = words("mul multiply __mul__ __rmul__")
SAMPLE = "grid_sample"
_STACKING = JOIN | words("view reshape flatten unflatten permute transpose movedim contiguous squeeze unsqueeze")
_MOST_STEPS_BACK = 64  # operations that are looked through for the product behind a softmax
_MOST_HELD = 8  # products whose operands are kept in the first forward pass, where it is unknown which will become attention
_PATH = BETWEEN | words("clamp clip clamp_min clamp_max tanh softmax log_softmax exp maximum minimum tril triu __setitem__")


class Held:
    """Operands of the latest products of a running forward pass, by the index of their entry on the tape (list of calls)."""

    def __init__(self) -> None:
        """Start without products."""
        self._held: dict[int, tuple[Tensor, ...]] = {}

    def hold(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Keep the two last operands of the product that is entry `number` of the tape; the oldest product is forgotten."""
        operands = tuple(tensors_of(args, kwargs or {})[-2:])
        if len(operands) == 2:
            self._held[number] = operands
            if len(self._held) > _MOST_HELD:
                oldest = next(iter(self._held))
                del self._held[oldest]

    def operands(self, tracer: Tracer, number: int | None) -> tuple[Tensor, ...] | None:
        """Return the operands of the product that is entry `number` of the tape; None if they are not kept, or were overwritten."""
        operands = self._held.get(number) if number is not None else None
        if operands is None or number is None:
            return None
        refs = tracer.tape.entries[number].refs[-2:]
        are_unchanged = all(tracer.slot_of(operand) == ref.slot for operand, ref in zip(operands, refs, strict=True))
        return operands if are_unchanged else None

    def factors(self, tracer: Tracer, result: object) -> tuple[int, tuple[Tensor, ...]] | None:
        """Return index and operands of the elementwise product `a * b` whose result is `result`.

        Return None if they are not kept, or were overwritten.
        """
        slot = tracer.slot_of(result) if self._held and isinstance(result, Tensor) else None
        if slot is None:
            return None
        for number in self._held:
            entry = tracer.tape.entries[number]
            if entry.operation.name not in _MULTIPLY:
                continue
            product = entry.outs[0]
            if product is not None and product.slot == slot:
                operands = self.operands(tracer, number)
                return None if operands is None else (number, operands)
        return None

    def clear(self) -> None:
        """Release all operands."""
        self._held.clear()


def sampled_behind(tape: Tape, slot: int) -> tuple[int, ...]:
    """Return the indices of the `grid_sample` calls whose results were reshaped and joined to the tensor in a slot of the tape.

    Return none if anything else took part. The tape is searched backward, from the tensor to its sources.
    """
    samplings: list[int] = []
    open_slots = {slot}  # tensors whose source is not found yet
    last = len(tape.entries) - 1
    for number in range(last, max(last - _MOST_STEPS_BACK, -1), -1):
        entry = tape.entries[number]
        result = entry.outs[0] if entry.outs else None
        if result is None or result.slot not in open_slots:
            continue
        if entry.operation.own and entry.operation.name == SAMPLE:
            samplings.append(number)
        elif not entry.operation.own or entry.operation.name not in _STACKING:
            return ()
        else:
            open_slots |= {ref.slot for ref in entry.refs}
        open_slots.discard(result.slot)
    return () if open_slots else tuple(reversed(samplings))


def is_weighing(tape: Tape, entry: Entry) -> bool:
    """Check whether an entry multiplies attention weights elementwise by other data from the image, such as values."""
    if not entry.operation.own or entry.operation.name not in _MULTIPLY or len(entry.refs) != 2:
        return False
    left, right = (ref.slot for ref in entry.refs)
    left_is_weights, right_is_weights = left in tape.weights, right in tape.weights
    if left_is_weights == right_is_weights:
        return False
    other = right if left_is_weights else left
    return other in tape.descends


def product_behind(tape: Tape, softmaxes: frozenset[int]) -> int | None:
    """Return the index of the product of queries and keys whose result these softmax entries normalize.

    The tape is searched backward, through scaling, masks and the like. Of a sum, each term is followed that has as many elements
    and may depend on the image. Return None if no product is found, or several.
    """
    products: set[int] = set()
    for softmax in softmaxes:
        normalized = tape.entries[softmax].outs[0]
        count = 0 if normalized is None else normalized.shape.numel()
        followed_slots = {ref.slot for ref in tape.entries[softmax].refs}
        for number in range(softmax - 1, max(softmax - _MOST_STEPS_BACK, 0) - 1, -1):
            entry = tape.entries[number]
            followed_slots |= {before for before, after in entry.rewritten if after in followed_slots}
            result = entry.outs[0] if entry.outs else None
            if result is None or result.slot not in followed_slots:
                continue
            may_be_scores = result.shape.numel() == count and result.slot in tape.descends
            if not may_be_scores:
                continue
            if entry.operation.own and entry.operation.name in SCORING and len(entry.refs) > 1:
                products.add(number)
            elif entry.operation.own and entry.operation.name in _PATH:
                followed_slots |= {ref.slot for ref in entry.refs}
    return products.pop() if len(products) == 1 else None
