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
        """Parse the arguments of `torch.einsum`; an ellipsis becomes letters, and a missing result is written out.

        `ndim` returns the number of axes of an operand, if operands are no tensors. Return None if axes are given as numbers, or if
        an operand has an axis twice.
        """
        if not args or not isinstance(args[0], str):
            return None
        operands = list(args[1]) if len(args) == 2 and isinstance(args[1], (tuple, list)) else list(args[1:])
        inputs, arrow, result = args[0].replace(" ", "").partition("->")
        letters = inputs.split(",")
        if len(letters) != len(operands):
            return None
        count_axes = ndim or (lambda operand: operand.ndim)
        unused_letters = [letter for letter in ascii_letters if letter not in args[0]]
        hidden_axes = [  # axes of each operand that its ellipsis stands for
            count_axes(operand) - len(names) + len("...") if "..." in names else None
            for operand, names in zip(operands, letters, strict=True)
        ]
        most_hidden = max((hidden for hidden in hidden_axes if hidden is not None), default=0)
        ellipsis = "".join(unused_letters[:most_hidden])
        full_letters = [
            names if hidden is None else names.replace("...", ellipsis[len(ellipsis) - hidden :])
            for names, hidden in zip(letters, hidden_axes, strict=True)
        ]
        if not arrow:  # the result has all letters that occur once, in alphabetical order
            counts = Counter("".join(names.replace("...", "") for names in letters))
            single_letters = sorted(letter for letter in counts if counts[letter] == 1)
            result = ("..." if ellipsis else "") + "".join(single_letters)
        result = result.replace("...", ellipsis)
        if any(len(set(names)) < len(names) for names in full_letters):  # a diagonal
            return None
        return cls(operands, full_letters, result)
