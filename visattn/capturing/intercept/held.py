"""Operands of products that a model writes out, kept until a later operation has turned out to be attention.

These are queries and keys, before the softmax over their product; factors that are multiplied elementwise, before the sum; and maps with
the points at which they are sampled, before the samples are weighted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from visattn.capturing.intercept.softmax import BETWEEN, PRODUCT, tensors_of
from visattn.capturing.trace.operations import JOIN, words
from visattn.capturing.trace.tape import Entry, Tape
from visattn.capturing.trace.tracer import Tracer

SCORING = PRODUCT | {"baddbmm", "einsum"}
_MULTIPLY = words("mul multiply __mul__ __rmul__")
SAMPLE = "grid_sample"
_STACKING = JOIN | words("view reshape flatten unflatten permute transpose movedim contiguous squeeze unsqueeze")
_FAR = 64  # operations that are looked through for the product behind a softmax
_KEPT = 8  # products whose operands are kept in the first forward pass, where it is unknown which will become attention
_PATH = BETWEEN | words("clamp clip clamp_min clamp_max tanh softmax log_softmax exp maximum minimum tril triu __setitem__")


class Held:
    """Operands of the latest products of a running forward pass, by the index of their entry."""

    def __init__(self) -> None:
        """Start without products."""
        self._held: dict[int, tuple[Tensor, ...]] = {}

    def hold(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Keep the two last operands of a product."""
        operands = tuple(tensors_of(args, kwargs or {})[-2:])
        if len(operands) == 2:
            self._held[number] = operands
            if len(self._held) > _KEPT:
                del self._held[next(iter(self._held))]

    def operands(self, tracer: Tracer, number: int | None) -> tuple[Tensor, ...] | None:
        """Return the operands of a product; None if they are not kept, or were overwritten since."""
        operands = self._held.get(number) if number is not None else None
        if operands is None or number is None:
            return None
        refs = tracer.tape.entries[number].refs[-2:]
        same = all(tracer.slot_of(operand) == ref.slot for operand, ref in zip(operands, refs, strict=True))
        return operands if same else None

    def factors(self, tracer: Tracer, result: object) -> tuple[int, tuple[Tensor, ...]] | None:
        """Return index and operands of the elementwise product that made a tensor; None if they are not kept, or were overwritten."""
        slot = tracer.slot_of(result) if self._held and isinstance(result, Tensor) else None
        if slot is None:
            return None
        for number in self._held:
            entry = tracer.tape.entries[number]
            if entry.operation.name in _MULTIPLY and (made := entry.outs[0]) is not None and made.slot == slot:
                operands = self.operands(tracer, number)
                return None if operands is None else (number, operands)
        return None

    def clear(self) -> None:
        """Release all operands."""
        self._held.clear()


def sampled_behind(tape: Tape, slot: int) -> tuple[int, ...]:
    """Return the indices of the entries whose samples were moved and joined to the tensor in a slot; none if it has other sources."""
    found: list[int] = []
    wanted = {slot}
    for number in range(len(tape.entries) - 1, max(len(tape.entries) - 1 - _FAR, -1), -1):
        entry = tape.entries[number]
        made = entry.outs[0] if entry.outs else None
        if made is None or made.slot not in wanted:
            continue
        if entry.operation.own and entry.operation.name == SAMPLE:
            found.append(number)
        elif not entry.operation.own or entry.operation.name not in _STACKING:
            return ()
        else:
            wanted |= {ref.slot for ref in entry.refs}
        wanted.discard(made.slot)
    return () if wanted else tuple(reversed(found))


def is_weighing(tape: Tape, entry: Entry) -> bool:
    """Check whether an operation multiplies weights elementwise by other data from the image."""
    if not entry.operation.own or entry.operation.name not in _MULTIPLY or len(entry.refs) != 2:
        return False
    slots = [ref.slot for ref in entry.refs]
    weights = [slot in tape.weights for slot in slots]
    return weights[0] != weights[1] and slots[weights[0]] in tape.descends


def product_behind(tape: Tape, softmaxes: frozenset[int]) -> int | None:
    """Return the index of the product of tokens whose result these softmax entries normalize; None if there is none, or several.

    Terms that are added to the scores are looked through if they have as many elements and depend on the image.
    """
    found: set[int] = set()
    for softmax in softmaxes:
        normalized = tape.entries[softmax].outs[0]
        size = 0 if normalized is None else normalized.shape.numel()
        wanted = {ref.slot for ref in tape.entries[softmax].refs}
        for number in range(softmax - 1, max(softmax - _FAR, 0) - 1, -1):
            entry = tape.entries[number]
            wanted |= {before for before, after in entry.rewritten if after in wanted}
            made = entry.outs[0] if entry.outs else None
            if made is None or made.slot not in wanted or made.shape.numel() != size or made.slot not in tape.descends:
                continue
            if entry.operation.own and entry.operation.name in SCORING and len(entry.refs) > 1:
                found.add(number)
            elif entry.operation.own and entry.operation.name in _PATH:
                wanted |= {ref.slot for ref in entry.refs}
    return found.pop() if len(found) == 1 else None
