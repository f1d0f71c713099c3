"""Checks shared by the public boundary: unknown names, ranges, finite values, names that are safe to print."""

from __future__ import annotations

import difflib
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Sequence

from visattn.errors import OptionError


def suggest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The `count` names of `known` nearest to `name`, nearest first; may be empty."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)


def one_of(value: str, known: Sequence[str], what: str) -> str:
    """Return `value` if it is one of `known`.

    Raises:
        OptionError: If it is not; the message lists the nearest and all known names.
    """
    if value in known:
        return value
    near = suggest(str(value), known, 1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise OptionError(f"unknown {what} '{value}'{hint} Known: {', '.join(known)}.")


def between(value: float, low: float, high: float, what: str) -> float:
    """Return `value` if it is a number in `[low, high]`.

    Raises:
        OptionError: If it is not a number or lies outside.
    """
    if not isinstance(value, (int, float)) or not low <= value <= high:
        raise OptionError(f"{what} must be a number from {low:g} to {high:g}, got {shown(value)}.")
    return float(value)


def whole_number(text: str) -> int | None:
    """The whole number that a text is, of nine digits at most; None if it is none. `isdigit` would also take `²`."""
    return int(text) if re.fullmatch(r"\s*-?[0-9]{1,9}\s*", text) else None


def first_line(error: BaseException) -> str:
    """Return the first line of what an error of others says, safe to print."""
    return printable(next(iter(str(error).strip().splitlines()), ""))


def printable(name: str) -> str:
    """`name` with control characters, direction marks and undecodable bytes escaped, so that it stays on one line."""
    return "".join(c if c.isprintable() and unicodedata.category(c) not in ("Cf", "Cs") else ascii(c)[1:-1] for c in name)


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother = 3, 100, 100


def shown(value: object) -> str:
    """Return a value from outside as Python writes it, on one line; what is long or deep is cut."""
    try:
        return printable(_BRIEF.repr(value))
    except ValueError:  # Python writes no number of thousands of digits
        return f"a {type(value).__name__} too long to be shown"


def told(value: object) -> str:
    """Return a text from outside as it is, and any other value as `shown` does."""
    return printable(value) if isinstance(value, str) else shown(value)
