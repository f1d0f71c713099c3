"""Queries and keys of attention that a model writes out: the operands of the product behind its softmax.

Each element of that product belongs to one vector of either operand. The numbers of these vectors are moved along the tape as the
model moves the scores, up to the product of weights and values. There each row must belong to one query, and each column to one
key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from visattn.core.capturing.following.tape_moves import MOVES, moved_by
from visattn.core.capturing.tokens.equations import Equation
from visattn.core.capturing.trace.tape import Attention, Entry, Ref, Tape

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
    numbered = _numbered(tape, tape.entries[attention.scores])
    if numbered is None:
        return None
    (first, first_axes), (second, second_axes) = numbered
    numbers = _moved_to_weights(tape, attention, first, second)
    if numbers is None or not numbers[0].numel():  # unknown, or a call without tokens
        return None
    axes = first_axes, second_axes
    for query_side, key_side in ((0, 1), (1, 0)):
        rows, columns = numbers[query_side], numbers[key_side]
        has_one_query_per_row = bool((rows == rows[..., :1]).all())
        has_one_key_per_column = bool((columns == columns[..., :1, :]).all())
        if has_one_query_per_row and has_one_key_per_column:
            query = Part(query_side, axes[query_side], rows[..., 0].clone())
            key = Part(key_side, axes[key_side], columns[..., 0, :].clone())
            return Vectors(query, key)
    return None


def _numbered(tape: Tape, entry: Entry) -> tuple[tuple[Tensor, tuple[int, ...]], ...] | None:
    """Number the vectors of both operands of a product of scores, such as `q @ k.mT`.

    Returns:
        For each operand, the number of its vector behind each element of the result, in the shape of the result, and the axes of
        `Part`. None if the product does not sum over one axis of both.
    """
    product = entry.outs[0]
    shapes = [shape for ref in entry.refs[-2:] if (shape := _shape(tape, ref.slot)) is not None]
    if product is None or len(shapes) < 2:
        return None
    operands, result = _letters(tape, entry, shapes, len(product.shape))
    if [len(letters) for letters in operands] != [len(shape) for shape in shapes]:
        return None
    left, right = set(operands[0]), set(operands[1])
    summed_letters, dropped_letters = (left & right) - set(result), (left ^ right) - set(result)
    if len(summed_letters) != 1 or dropped_letters:
        return None
    summed = summed_letters.pop()
    numbered = []
    for letters, shape in zip(operands, shapes, strict=True):
        vector_letters = letters.replace(summed, "")
        size_of = dict(zip(letters, shape, strict=True))
        vector_sizes = [size_of[letter] for letter in vector_letters]
        number = torch.arange(math.prod(vector_sizes), dtype=torch.int32).view(vector_sizes)
        order = [vector_letters.index(letter) for letter in result if letter in vector_letters]
        spread_sizes = [size_of[letter] if letter in vector_letters else 1 for letter in result]
        spread = number.permute(order).reshape(spread_sizes).expand(product.shape)
        axes = *(letters.index(letter) for letter in vector_letters), letters.index(summed)
        numbered.append((spread, axes))
    return tuple(numbered)


def _letters(tape: Tape, entry: Entry, shapes: Sequence[torch.Size], result_ndim: int) -> tuple[Sequence[str], str]:
    """Return letters for the axes of both operands of a product, and of its result, as `einsum` has them; none if unknown."""
    if entry.operation.name == "einsum":
        equation = Equation.of(entry.args, lambda ref: len(_shape(tape, ref.slot) or ()))
        if equation is None or len(equation.letters) != 2:
            return (), ""
        return equation.letters, equation.result
    result = "".join(chr(ord("a") + i) for i in range(result_ndim))
    lead, row, column = result[:-2], result[-2], result[-1]
    left, right = (lead[len(lead) - len(shape) + 2 :] for shape in shapes)
    return [left + row + "z", right + "z" + column], result


def _moved_to_weights(tape: Tape, attention: Attention, *numbers: Tensor) -> tuple[Tensor, ...] | None:
    """Move numbers of vectors as the model moves the scores, from their product to the weights `(*lead, q, k)` of the call.

    Return None if some operation in between mixes tokens.
    """
    assert attention.scores is not None  # noqa: S101 - the caller has checked it
    product = tape.entries[attention.scores].outs[0]
    assert product is not None  # noqa: S101 - so has it
    weights = attention.operands[0]
    numbers_by_slot: dict[int, tuple[Tensor, ...]] = {product.slot: numbers}
    for entry in tape.entries[attention.scores + 1 :]:
        if entry.attention is attention:
            break
        for before, after in entry.rewritten:
            if before in numbers_by_slot:
                numbers_by_slot[after] = numbers_by_slot[before]
        made = entry.outs[0] if entry.outs else None
        source = next((ref.slot for ref in entry.refs if ref.slot in numbers_by_slot), None)
        if made is None or source is None or not entry.operation.own:
            continue
        source_numbers = numbers_by_slot[source]
        if entry.operation.name in MOVES:
            moved = [moved_by(entry, number, made.shape) for number in source_numbers]
            fitting = tuple(number for number in moved if number is not None and number.shape == made.shape)
            if len(fitting) == len(source_numbers):
                numbers_by_slot[made.slot] = fitting
        elif source_numbers[0].shape == made.shape and _mixes_no_tokens(entry, numbers_by_slot, source_numbers):
            numbers_by_slot[made.slot] = source_numbers  # elementwise, a softmax, or a mixing of heads
    weight_numbers = numbers_by_slot.get(weights.slot)
    return None if weight_numbers is None else tuple(weights.view(number) for number in weight_numbers)


def _mixes_no_tokens(entry: Entry, numbers_by_slot: Mapping[int, tuple[Tensor, ...]], source_numbers: Sequence[Tensor]) -> bool:
    """Check that a call mixes no tokens, and that scores which it writes into others come back to where they were taken from."""
    if entry.operation.name in _MIXED_AXIS:
        axis = _MIXED_AXIS[entry.operation.name]
        query_changes, key_changes = (bool((number != number.narrow(axis, 0, 1)).any()) for number in source_numbers)
        return query_changes == key_changes  # from head to head both vectors change, from token to token only one
    if entry.operation.name != "__setitem__":
        return True
    target, index, value = entry.args
    if not isinstance(value, Ref) or value.slot not in numbers_by_slot:
        return True  # a mask
    if len(entry.refs) > 2:
        return False
    for target_number, value_number in zip(numbers_by_slot[target.slot], numbers_by_slot[value.slot], strict=True):
        written = target_number.clone()
        written[index] = value_number
        if not torch.equal(written, target_number):
            return False
    return True


def _shape(tape: Tape, slot: int) -> torch.Size | None:
    """Return the shape of the tensor in a slot; None if the tape does not know the slot."""
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
