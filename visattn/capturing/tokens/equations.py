"""Einsum equations in explicit form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from string import ascii_letters
from typing import Any, NamedTuple


class Equation(NamedTuple):
    """Einsum equation without ellipses.

    Attributes:
        operands: Operands of the einsum.
        letters: Axis letters of each operand.
        result: Axis letters of the result.
    """

    operands: list[Any]
    letters: list[str]
    result: str

    @classmethod
    def of(cls, args: Sequence[Any], ndim: Any = None) -> Equation | None:  # noqa: ANN401
        """Parse the arguments of an einsum; `ndim` returns the number of axes of an operand.

        Return None if axes are given as numbers, or if an operand has an axis twice.
        """
        if not args or not isinstance(args[0], str):
            return None
        operands = list(args[1]) if len(args) == 2 and isinstance(args[1], (tuple, list)) else list(args[1:])
        inputs, arrow, result = args[0].replace(" ", "").partition("->")
        letters = inputs.split(",")
        if len(letters) != len(operands):
            return None
        count = ndim or (lambda operand: operand.ndim)
        free = [letter for letter in ascii_letters if letter not in args[0]]
        most = max((count(x) - len(names) + 3 for x, names in zip(operands, letters, strict=True) if "..." in names), default=0)
        dots = "".join(free[:most])
        written = [
            names.replace("...", dots[len(dots) - (count(x) - len(names) + 3) :] if "..." in names else "")
            for x, names in zip(operands, letters, strict=True)
        ]
        if not arrow:
            counts = Counter("".join(names.replace("...", "") for names in letters))
            result = ("..." if dots else "") + "".join(sorted(letter for letter in counts if counts[letter] == 1))
        result = result.replace("...", dots)
        if any(len(set(names)) < len(names) for names in written):  # a diagonal
            return None
        return cls(operands, written, result)
