"""Lists of numbers among options."""

from __future__ import annotations

import re

from visattn._support.checks import printable
from visattn.errors import OptionError

__all__ = ["numbers_of"]


def numbers_of(text: str | None) -> list[int] | None:
    """Return the numbers that a list such as `0,3-5` names, the value of --heads.

    Raises:
        OptionError: If it is no such list.
    """
    if text is None:
        return None
    parts = [re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part) for part in text.split(",")]
    ranges = [(int(part[1]), int(part[2] or part[1])) for part in parts if part]
    if not all(parts) or any(first > last for first, last in ranges):
        raise OptionError(f"--heads must be numbers and rising ranges such as 0,3-5, got '{printable(text)}'.")
    return list(dict.fromkeys(number for first, last in ranges for number in range(first, last + 1)))
