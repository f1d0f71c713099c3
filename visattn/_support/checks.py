"""Checks of arguments of public functions: unknown names, ranges, and text that is safe to print."""

from __future__ import annotations

import difflib
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from visattn._support.faces import Later
from visattn.errors import ModelError, OptionError

if TYPE_CHECKING:
    from visattn._support import other_words
else:
    other_words = Later("visattn._support.other_words")

T = TypeVar("T")


def suggest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` names in `known` that are close to `name`, the closest first; else names that contain it."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=count, cutoff=0.6)
    return near or [one for one in names if len(name) > 2 and name.lower() in one.lower()][:count]


def one_of(value: str, known: Sequence[str], what: str, also: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return `value` if it is one of `known`.

    Args:
        value: The value.
        known: Names that are accepted.
        what: What they name.
        also: Other names for some of them, for the message.

    Raises:
        OptionError: If it is not; the message gives the name that is meant, or the closest, and lists all known ones.
    """
    if value in known:
        return value
    meant = other_words.value_meant(what, value, known, also)
    near = [meant] if meant else suggest(str(value), known, 1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise OptionError(f"unknown {what} '{told(value)}'{hint} Known: {', '.join(known)}.")


def as_list(values: Iterable[T]) -> Sequence[T]:
    """Return a sequence as it is, as it may make its elements only when they are asked for; anything else as a list."""
    return values if isinstance(values, Sequence) else list(values)


def one_each(count: int, **given: Sequence[Any] | None) -> None:
    """Check that every list that is given has an entry for each image.

    Raises:
        OptionError: If one has not; the message names it.
    """
    for what, values in given.items():
        if values is not None and len(values) != count:
            raise OptionError(f"{what} must have an entry for each of the {count} images, got {len(values)}.")


def between(value: float, low: float, high: float, what: str) -> float:
    """Return `value` if it is a number in `[low, high]`.

    Raises:
        OptionError: If it is not a number or is out of range.
    """
    if not isinstance(value, (int, float)) or not low <= value <= high:
        raise OptionError(f"{what} must be a number from {low:g} to {high:g}, got {shown(value)}.")
    return float(value)


def at_least(what: str, value: int, low: int = 1) -> int:
    """Return `value` if it is a whole number of at least `low`.

    Raises:
        OptionError: If it is not.
    """
    if not isinstance(value, int) or value < low:
        raise OptionError(f"{what} must be a whole number of at least {low}, got {printable(repr(value))}.")
    return value


def check_scores(scores: Any) -> None:  # noqa: ANN401 - a tensor
    """Raise ModelError if a score is NaN or infinite."""
    if not bool(scores.isfinite().all()):
        raise ModelError("the score is NaN or infinite. Check the weights, the input and the target that give it.")


def whole_number(text: str) -> int | None:
    """Parse a whole number of at most nine digits; return None for any other text. `isdigit` would also accept `²`."""
    return int(text) if re.fullmatch(r"\s*-?[0-9]{1,9}\s*", text) else None


def first_line(error: BaseException) -> str:
    """Return the first line of the message of a foreign error, safe to print."""
    return printable(next(iter(str(error).strip().splitlines()), ""))


def unreadable(error: OSError | ValueError, path: object) -> str:
    """Return a message that a file or folder cannot be read: its name, the cause, and what to check.

    A `ValueError` is that of a path with a null byte.
    """
    checked = "permissions and those of its folder" if isinstance(error, PermissionError) else "path"
    cause = printable(getattr(error, "strerror", None) or str(error)).lower()
    return f"{printable(str(getattr(error, 'filename', None) or path))}: cannot be read ({cause}). Check its {checked}."


def printable(name: str) -> str:
    """Escape control characters, direction marks and undecodable bytes in `name`, so that it prints on one line."""
    if name.isascii() and name.isprintable():
        return name
    return "".join(c if c.isprintable() and unicodedata.category(c) not in ("Cf", "Cs") else ascii(c)[1:-1] for c in name)


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother = 3, 100, 100


def shown(value: object) -> str:
    """Return the repr of an untrusted value on one line; long or deeply nested values are cut."""
    try:
        return printable(_BRIEF.repr(value))
    except ValueError:  # Python refuses to print numbers with thousands of digits
        return f"a {type(value).__name__} too long to show"


def told(value: object) -> str:
    """Return untrusted text, made safe to print, and any other value as `shown` does."""
    return printable(value) if isinstance(value, str) else shown(value)
