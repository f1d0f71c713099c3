"""Products of queries and keys that a model writes out, kept until the softmax over them has turned out to be attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from visattn.capturing.intercept.softmax import BETWEEN, PRODUCT, tensors_of
from visattn.capturing.trace.operations import words
from visattn.capturing.trace.tape import Tape
from visattn.capturing.trace.tracer import Tracer

SCORING = PRODUCT | {"baddbmm", "einsum"}
_FAR = 64  # operations that are looked through for the product behind a softmax
_KEPT = 8  # products whose operands are kept in the first forward pass, where it is unknown which will become attention
_PATH = BETWEEN | words("clamp clip clamp_min clamp_max tanh softmax log_softmax exp maximum minimum tril triu __setitem__")


class Scores:
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

    def take(self, tracer: Tracer, number: int | None) -> tuple[Tensor, ...] | None:
        """Return the operands of a product; None if they are not kept, or were overwritten since."""
        operands = self._held.pop(number, None) if number is not None else None
        if operands is None or number is None:
            return None
        refs = tracer.tape.entries[number].refs[-2:]
        same = all(tracer.slot_of(operand) == ref.slot for operand, ref in zip(operands, refs, strict=True))
        return operands if same else None

    def clear(self) -> None:
        """Release all operands."""
        self._held.clear()


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
