"""Numbers that leave the tensors of a forward pass for Python: what is made from numbers afterwards may come from there.

Flags and lengths are no such numbers.
"""

from __future__ import annotations

from visattn.capturing.placing import pointwise
from visattn.capturing.placing.nodes import Node
from visattn.capturing.placing.shadows import Shadows
from visattn.capturing.placing.table import Row
from visattn.capturing.placing.work import Work

_FROM_NUMBERS = frozenset({"fill"})
_SIZES = frozenset(
    {"dim", "size", "n", "m", "dtype", "layout", "memory_format", "steps", "correction"}
)  # arguments that are no values; so is the end of a range


class Numbers:
    """Numbers that Python has read.

    Attributes:
        read: Whether some come from the image, or may.
    """

    def __init__(self, shadows: Shadows) -> None:
        """Start before any number was read."""
        self.read, self._shadows = False, shadows
        self._flags: set[int] = set()

    def leave(self, node: int) -> None:
        """Note that numbers were read from a tensor."""
        places = self._shadows.of(node)
        apart = places.kind == "learned" or bool(places.positions) or self._is_flag(node)
        self.read = self.read or not apart

    def note_sum(self, work: Work, node: Node) -> None:
        """Note a sum over one flag for each element."""
        source = next(work.nodes())
        if self._is_flag(source) and work.shape.numel() == work.facts(source).shape.numel():
            self._flags.add(node)

    def _is_flag(self, node: int) -> bool:
        """Check whether a tensor holds flags, or numbers that are 0 or 1 and each tell no more than one flag."""
        facts = self._shadows.facts[node]
        return not facts.number or (node in self._flags and facts.memory not in self._shadows.overwritten)


def holds_number(work: Work, row: Row | None) -> bool:
    """Check whether a result has the value of a number that the model passes, other than zero."""
    name = work.name
    if name not in _FROM_NUMBERS and row is not None and not row.makes and row.rule is not pointwise.combined:
        return False
    if name in ("lift_fresh", "lift"):
        return True
    given = (value for key, value in work.step.given.items() if key not in _SIZES and (name, key) != ("arange", "end"))
    return any(isinstance(value, (int, float, complex)) and not isinstance(value, (bool, Node)) and value != 0 for value in given)
