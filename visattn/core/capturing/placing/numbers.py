"""Numbers that leave the tensors of a forward pass for Python: what is made from numbers afterwards may come from there.

Flags are no such numbers. A length is one if it depends on the image, such as the number of tokens that a mask picks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from visattn.core.capturing.placing import constants as creation, moves, pointwise, writes
from visattn.core.capturing.placing.nodes import Node, tensors_in_nodes
from visattn.core.capturing.placing.operation_table import Row
from visattn.core.capturing.placing.shadows import Shadows
from visattn.core.capturing.placing.steps import signature_of, tensors
from visattn.core.capturing.placing.work import Work

_FILLING = frozenset({"fill"})
_SIZES = frozenset(
    {"dim", "size", "n", "m", "dtype", "layout", "memory_format", "steps", "correction"}
)  # arguments that are no values; so is the end of a range
_KEEPING = frozenset({"permute", "transpose", "t", "squeeze", "unsqueeze"})  # moves that keep all elements in their order
_TABLES = frozenset({"self", "weight"})  # arguments whose elements are chosen by others


class Numbers:
    """Numbers that Python has read; `Shadows.told` says whether some may come from the image."""

    def __init__(self, shadows: Shadows) -> None:
        """Start before any number was read."""
        self._shadows = shadows
        self._flags: set[int] = set()
        self._counted: set[int] = set()  # tensors whose length may come from the image

    def leave(self, node: int) -> None:
        """Note that Python read numbers from a tensor, as by `item()`. Flags, and numbers that no image changes, do not count."""
        self._shadows.told |= not (self._is_independent(node) or self._is_flag(node))

    def leave_length(self, node: int) -> None:
        """Note that Python read the shape of a tensor, which may depend on the image."""
        self._shadows.told |= node in self._counted

    def note_sum(self, work: Work, node: Node) -> None:
        """Note a result of `sum` in which each element is the sum of one flag alone, so is 0 or 1 and tells no more than it."""
        source = next(work.nodes())
        if self._is_flag(source) and work.shape.numel() == work.facts(source).shape.numel():
            self._flags.add(node)

    def note_lengths(self, work: Work, row: Row | None, made: Sequence[Node]) -> None:
        """Note results whose length may depend on the image, as that of `tokens[mask]`."""
        counted = [result for result in made if self._has_image_length(work, row, result)]
        self._counted.update(counted)

    def tells_length(self, work: Work, row: Row | None) -> bool:
        """Check whether a result may have a value that is a length from the image.

        The sum of as many ones as a mask picks is an example. Elementwise operations and moves tell no length.
        """
        if not self._counted or row is None or row.makes or row.rule in _ELEMENTWISE:
            return False
        if row.rule is moves.moved and work.name in _KEEPING:
            return False
        picks_elements = row.contents and row.rule in (moves.indexed, creation.embedded)
        read = {name: value for name, value in work.step.given.items() if not picks_elements or name in _TABLES}
        return any(node in self._counted for value in read.values() for node in tensors_in_nodes(value))

    def _has_image_length(self, work: Work, row: Row | None, result: Node) -> bool:
        """Check whether the length of a result may depend on the image, as the number of tokens that a mask picks."""
        facts = self._shadows.facts
        is_made_from_numbers = row is not None and row.makes and not work.name.endswith("_like")
        if is_made_from_numbers:
            return self._shadows.told and len(facts[result].shape) > 0
        given, op = work.step.given, work.step.op
        arguments = [node for value in given.values() for node in tensors_in_nodes(value)]
        counts_elements = facts[result].dynamic and op is not None and signature_of(op).counts
        if counts_elements:  # as `nonzero` does, and an index that is a mask
            if row is not None and _picks_all(work, row):
                return False
            masks = arguments if row is None else [node for name in row.contents for node in tensors_in_nodes(given.get(name))]
            is_told = (node in self._counted or not (self._is_independent(node) or self._counts_one_flag(node)) for node in masks)
            return any(is_told)
        keeps_shape = row is not None and (row.rule.__module__ == writes.__name__ or row.rule is pointwise.combined)
        same_shape = [node for node in arguments if facts[node].shape == facts[result].shape] if keeps_shape else []
        return any(node in self._counted for node in arguments) and all(node in self._counted for node in same_shape)

    def _is_independent(self, node: int) -> bool:
        """Check whether a tensor holds nothing that depends on the image."""
        places = self._shadows.of(node)
        return places.kind == "learned" or bool(places.positions)

    def _counts_one_flag(self, node: int) -> bool:
        """Check whether a tensor holds one flag, so that the number of elements that are not zero tells no more."""
        return self._is_flag(node) and self._shadows.facts[node].shape.numel() == 1

    def _is_flag(self, node: int) -> bool:
        """Check whether a tensor holds flags (booleans), or numbers that are 0 or 1 and each tell no more than one flag."""
        facts = self._shadows.facts[node]
        return not facts.number or (node in self._flags and facts.memory not in self._shadows.overwritten)


def _picks_all(work: Work, row: Row) -> bool:
    """Check whether a mask picks all elements, which tells no more than one flag."""
    masks = [mask for name in row.contents for mask in tensors(work.step.contents.get(name)) if mask.dtype == torch.bool]
    return bool(masks) and all(bool(mask.all()) for mask in masks)


_ELEMENTWISE = (pointwise.combined, moves.same, moves.shaped, moves.expanded, moves.joined_by)


def holds_number(work: Work, row: Row | None) -> bool:
    """Check whether elements of a result may have the value of a number that the model passes, as in `full(shape, 3)`.

    Zero does not count, nor do sizes and axes.
    """
    name = work.name
    if name not in _FILLING and row is not None and not row.makes and row.rule is not pointwise.combined:
        return False
    if name in ("lift_fresh", "lift"):
        return True
    for argument, value in work.step.given.items():
        is_size = argument in _SIZES or (name, argument) == ("arange", "end")
        is_number = isinstance(value, (int, float, complex)) and not isinstance(value, (bool, Node))
        if is_number and not is_size and value != 0:
            return True
    return False
