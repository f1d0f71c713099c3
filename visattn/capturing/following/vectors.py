"""Queries and keys of attention that a model writes out: the operands of the product behind its softmax.

Each element of that product belongs to one vector of either operand. The numbers of these vectors are moved along the tape as the model
moves the scores, up to the product of weights and values. There each row must belong to one query, and each column to one key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from visattn.capturing.following.moves import MOVES, moved_by
from visattn.capturing.tokens.equations import Equation
from visattn.capturing.trace.tape import Attention, Entry, Ref, Tape

_MIXED_AXIS = {"linear": -1, "conv2d": 1}


class Part(NamedTuple):
    """Vectors of one operand of a product of scores.

    Attributes:
        side: 0 for the first operand of the product, 1 for the second.
        axes: Permutation of the operand's axes that puts the vectors' own axis last.
        number: `(*lead, tokens)` number of each vector, as the rows or columns of the weights have them.
    """

    side: int
    axes: tuple[int, ...]
    number: Tensor

    def of(self, operands: Sequence[Tensor]) -> Tensor:
        """Return the vectors, `(*lead, tokens, d)`."""
        operand = operands[self.side].permute(self.axes)
        return operand.reshape(-1, operand.shape[-1])[self.number.to(operand.device)]


class Vectors(NamedTuple):
    """Queries and keys of an attention call."""

    query: Part
    key: Part


def vectors_of(tape: Tape, attention: Attention) -> Vectors | None:
    """Find the queries and keys of an attention call; None if the weights are not those of one product, or its axes are unknown."""
    if attention.scores is None:
        return None
    numbers = _numbers(tape, tape.entries[attention.scores])
    if numbers is None:
        return None
    (first, first_axes), (second, second_axes) = numbers
    found = _followed(tape, attention, first, second)
    if found is None:
        return None
    first, second = found
    for (rows, side, axes), (columns, other_side, other_axes) in (
        ((first, 0, first_axes), (second, 1, second_axes)),
        ((second, 1, second_axes), (first, 0, first_axes)),
    ):
        if bool((rows == rows[..., :1]).all()) and bool((columns == columns[..., :1, :]).all()):
            query = Part(side, axes, rows[..., 0].clone())
            return Vectors(query, Part(other_side, other_axes, columns[..., 0, :].clone()))
    return None


def _numbers(tape: Tape, entry: Entry) -> tuple[tuple[Tensor, tuple[int, ...]], ...] | None:
    """Return, for either operand, the number of the vector that each element of the product belongs to, and the axes of `Part`."""
    made = entry.outs[0]
    shapes = [_shape(tape, ref.slot) for ref in entry.refs[-2:]]
    if made is None or len(shapes) < 2 or any(shape is None for shape in shapes):
        return None
    given = [shape for shape in shapes if shape is not None]
    if entry.operation.name == "einsum":
        equation = Equation.of(entry.args, lambda ref: len(_shape(tape, ref.slot) or ()))
        if equation is None or len(equation.letters) != 2:
            return None
        letters, result = equation.letters, equation.result
    else:
        result = "".join(chr(ord("a") + i) for i in range(len(made.shape)))
        lead = result[:-2]
        letters = [
            lead[len(lead) - len(given[0]) + 2 :] + result[-2] + "z",
            lead[len(lead) - len(given[1]) + 2 :] + "z" + result[-1],
        ]
    if [len(one) for one in letters] != [len(shape) for shape in given]:
        return None
    summed = (set(letters[0]) & set(letters[1])) - set(result)
    if len(summed) != 1 or (set(letters[0]) ^ set(letters[1])) - set(result):
        return None
    own = summed.pop()
    found = []
    for names, shape in zip(letters, given, strict=True):
        kept = names.replace(own, "")
        sizes = [shape[names.index(name)] for name in kept]
        number = torch.arange(math.prod(sizes), dtype=torch.int32).view(sizes)
        order = [kept.index(name) for name in result if name in kept]
        spread = number.permute(order).reshape([shape[names.index(name)] if name in kept else 1 for name in result])
        found.append((spread.expand(made.shape), (*(names.index(name) for name in kept), names.index(own))))
    return tuple(found)


def _followed(tape: Tape, attention: Attention, *numbers: Tensor) -> tuple[Tensor, ...] | None:
    """Move the numbers as the model moves the scores, from their product to the weights `(*lead, q, k)` of the attention call."""
    assert attention.scores is not None  # noqa: S101 - the caller has checked it
    start = tape.entries[attention.scores].outs[0]
    assert start is not None  # noqa: S101 - so has it
    weights = attention.operands[0]
    at: dict[int, tuple[Tensor, ...]] = {start.slot: numbers}
    for entry in tape.entries[attention.scores + 1 :]:
        if entry.attention is attention:
            break
        for before, after in entry.rewritten:
            if before in at:
                at[after] = at[before]
        made = entry.outs[0] if entry.outs else None
        slot = next((ref.slot for ref in entry.refs if ref.slot in at), None)
        if made is None or slot is None or not entry.operation.own:
            continue
        here = at[slot]
        if entry.operation.name in MOVES:
            moved = [moved_by(entry, one, made.shape) for one in here]
            there = tuple(one for one in moved if one is not None and one.shape == made.shape)
            if len(there) == len(here):
                at[made.slot] = there
        elif here[0].shape == made.shape and _unmoved(entry, at, here):  # elementwise, a softmax, or a mixing of heads
            at[made.slot] = here
    found = at.get(weights.slot)
    return None if found is None else tuple(weights.view(one) for one in found)


def _unmoved(entry: Entry, at: Mapping[int, tuple[Tensor, ...]], here: Sequence[Tensor]) -> bool:
    """Check that an operation mixes no tokens, and that scores written into others come back to where they were taken from."""
    if entry.operation.name in _MIXED_AXIS:
        axis = _MIXED_AXIS[entry.operation.name]
        first, second = (bool((one != one.narrow(axis, 0, 1)).any()) for one in here)
        return first == second  # from head to head both vectors change, from token to token only one
    if entry.operation.name != "__setitem__":
        return True
    into, index, value = entry.args
    if not isinstance(value, Ref) or value.slot not in at:
        return True  # a mask
    if len(entry.refs) > 2:
        return False
    for whole, part in zip(at[into.slot], at[value.slot], strict=True):
        written = whole.clone()
        written[index] = part
        if not torch.equal(written, whole):
            return False
    return True


def _shape(tape: Tape, slot: int) -> torch.Size | None:
    if slot in tape.outside:
        return tape.outside[slot].shape
    for entry in tape.entries:
        for made in entry.outs:
            if made is not None and made.slot == slot:
                return made.shape
        for before, after in entry.rewritten:
            if after == slot:
                return _shape(tape, before)
    return None
