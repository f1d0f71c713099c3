"""Numbers that leave the tensors of a forward pass for Python: what is made from numbers afterwards may come from there.

Flags are no such numbers. A length is one if it depends on the image, such as the number of tokens that a mask picks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from visattn.capturing.placing import creation, moves, pointwise, writes
from visattn.capturing.placing.nodes import Node, tensors_in_nodes
from visattn.capturing.placing.shadows import Shadows
from visattn.capturing.placing.table import Row
from visattn.capturing.placing.work import Work

_FROM_NUMBERS = frozenset({"fill"})
_SIZES = frozenset(
    {"dim", "size", "n", "m", "dtype", "layout", "memory_format", "steps", "correction"}
)  # arguments that are no values; so is the end of a range
_KEEPING = frozenset({"permute", "transpose", "t", "squeeze", "unsqueeze"})  # moves that keep all elements in their order
_TABLES = frozenset({"self", "weight"})  # arguments whose elements are chosen by others


class Numbers:
    """Numbers that Python has read.

    Attributes:
        read: Whether some come from the image, or may.
    """

    def __init__(self, shadows: Shadows) -> None:
        """Start before any number was read."""
        self.read, self._shadows = False, shadows
        self._flags: set[int] = set()
        self._counted: set[int] = set()  # tensors whose length may come from the image

    def leave(self, node: int) -> None:
        """Note that numbers were read from a tensor."""
        self.read = self.read or not (self._is_apart(node) or self._is_flag(node))

    def leave_length(self, node: int) -> None:
        """Note that the shape of a tensor was read."""
        self.read = self.read or node in self._counted

    def note_sum(self, work: Work, node: Node) -> None:
        """Note a sum over one flag for each element."""
        source = next(work.nodes())
        if self._is_flag(source) and work.shape.numel() == work.facts(source).shape.numel():
            self._flags.add(node)

    def note_lengths(self, work: Work, row: Row | None, made: Sequence[Node]) -> None:
        """Note results whose length may come from the image."""
        counted = [node for node in made if self._is_counted(work, row, node)]
        self._counted.update(counted)

    def tells_length(self, work: Work, row: Row | None) -> bool:
        """Check whether a result may have a value that is a length from the image, such as the sum of as many ones."""
        if not self._counted or row is None or row.makes or row.rule in _ELEMENTWISE:
            return False
        if row.rule is moves.moved and work.name in _KEEPING:
            return False
        chosen = row.contents and row.rule in (moves.indexed, creation.embedded)
        read = {name: value for name, value in work.step.given.items() if not chosen or name in _TABLES}
        return any(node in self._counted for value in read.values() for node in tensors_in_nodes(value))

    def _is_counted(self, work: Work, row: Row | None, node: Node) -> bool:
        facts = self._shadows.facts
        if row is not None and row.makes and not work.name.endswith("_like"):
            return self.read and len(facts[node].shape) > 0
        given, op = work.step.given, work.step.op
        nodes = [one for value in given.values() for one in tensors_in_nodes(value)]
        if facts[node].dynamic and op is not None and torch.Tag.dynamic_output_shape in op.tags:  # elements are counted here
            counting = [one for name in row.contents for one in tensors_in_nodes(given.get(name))] if row is not None else nodes
            return not all(map(self._is_apart, counting)) or any(one in self._counted for one in counting)
        fixed = row is not None and (row.rule.__module__ == writes.__name__ or row.rule is pointwise.combined)
        alike = [one for one in nodes if facts[one].shape == facts[node].shape] if fixed else []
        return any(one in self._counted for one in nodes) and all(one in self._counted for one in alike)

    def _is_apart(self, node: int) -> bool:
        """Check whether a tensor holds nothing that depends on the image."""
        places = self._shadows.of(node)
        return places.kind == "learned" or bool(places.positions)

    def _is_flag(self, node: int) -> bool:
        """Check whether a tensor holds flags, or numbers that are 0 or 1 and each tell no more than one flag."""
        facts = self._shadows.facts[node]
        return not facts.number or (node in self._flags and facts.memory not in self._shadows.overwritten)


_ELEMENTWISE = (pointwise.combined, moves.same, moves.shaped, moves.expanded, moves.joined_by)


def holds_number(work: Work, row: Row | None) -> bool:
    """Check whether a result has the value of a number that the model passes, other than zero."""
    name = work.name
    if name not in _FROM_NUMBERS and row is not None and not row.makes and row.rule is not pointwise.combined:
        return False
    if name in ("lift_fresh", "lift"):
        return True
    given = (value for key, value in work.step.given.items() if key not in _SIZES and (name, key) != ("arange", "end"))
    return any(isinstance(value, (int, float, complex)) and not isinstance(value, (bool, Node)) and value != 0 for value in given)
