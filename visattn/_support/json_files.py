"""JSON from files of untrusted sources: it is decoded into declared types, so that types, sizes and nesting are checked before use.

A type is made of `TypedDict`, whose other names are dropped, of dataclasses, lists, tuples and text, of the bounded numbers below, and of
`Free`, an object with any plain content. `Anything` accepts everything.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated, Any, ClassVar, TypedDict, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")
Content = bytes | str | msgspec.Raw
Anything: type[Any] = Any

SIDE = 2**20  # largest integer: pixels, cells and tokens along one axis
LARGEST = 1e30  # magnitude of any number
MOST = 2**30  # bytes of any file
_DEEPEST = 20  # nesting of objects and lists in a field of any content

Whole = Annotated[int, Meta(ge=-SIDE, le=SIDE)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Number = _Integer | Annotated[float, Meta(gt=-LARGEST, lt=LARGEST)]  # integers stay integers
Share = Annotated[float, Meta(ge=0, le=1)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]

_WORDS = {
    "array": "a list",
    "object": "an object",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}


class _Nothing(TypedDict):
    """No names."""


class Free(dict[str, Any]):
    """Object with plain values of any names. A subclass declares the types of some as `known`."""

    known: ClassVar[Any] = _Nothing


def decoded(content: Content, kind: type[T], name: str = "", *, most: int = MOST, lax: bool = False) -> T:
    """Decode JSON.

    Args:
        content: Content of a file.
        kind: Declared type.
        name: Name of the whole in messages. Fields are named by their path.
        most: Largest number of bytes, or of characters.
        lax: Whether to read what `json.dumps` writes beyond the standard: NaN, infinity, and names of files that are not UTF-8.

    Returns:
        The value.

    Raises:
        ValueError: If it is no JSON, too large, nested too deeply, or of another type; the message names the field, in one line.
    """
    if len(content) > most:
        raise ValueError(f"{name} takes {len(content):,} bytes, more than {most:,}".strip())
    try:
        return msgspec.json.decode(content, type=kind, dec_hook=_freed)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(error, name)) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    try:
        value = json.loads(content if isinstance(content, str) else bytes(content))  # its errors name the line
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply".strip()) from error
    except ValueError as error:
        raise ValueError(f"{name} must be valid JSON, got an error ({str(error)[:1].lower()}{str(error)[1:]})".strip()) from error
    if not lax:
        raise ValueError(f"{name} must be valid JSON, got NaN, infinity or half a character".strip())
    return converted(value, kind, name)


def converted(value: Any, kind: type[T], name: str = "") -> T:  # noqa: ANN401 - JSON
    """Convert JSON that was decoded as `Any` to a declared type; see `decoded`.

    Raises:
        ValueError: If it is of another type, or nested too deeply.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=_freed)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ValueError(_in_words(error, name)) from error
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply".strip()) from error


def _freed(kind: type[Free], value: Any) -> Free:  # noqa: ANN401 - JSON
    """Check the known names of a free object, and that the others are plain."""
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    try:
        known = msgspec.convert(value, kind.known, dec_hook=_freed)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error  # msgspec adds the path to errors of this type alone
    for name in value.keys() - known.keys():
        _check_plain(value[name], _DEEPEST - 1)
    return kind(value | known)


def _check_plain(value: Any, depth: int) -> None:  # noqa: ANN401 - JSON
    """Check that numbers are finite, and that nesting is not too deep to be saved again."""
    if depth == 0:
        raise ValueError("is nested too deeply")
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_plain(item, depth - 1)
    elif isinstance(value, (int, float)) and not abs(value) < LARGEST:
        raise ValueError("must hold finite numbers")


def _in_words(error: Exception, name: str) -> str:
    """Word an error of msgspec, such as "Expected `int`, got `str` - at `$.size[0]`"."""
    text, *places = str(error).split(" - at ")
    path = "".join(re.findall(r"\$([^`]*)", " ".join(reversed(places))))
    place = path[1:] if path.startswith(".") else name + path
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        return f"{f'{place}.' if path else ''}{missing[1]} is missing"
    text = re.sub(r"`([^`]*)`", lambda match: _kinds(match[1]), text)
    for theirs, ours in (
        ("Expected ", "must be "),
        ("Invalid enum value ", "must be one of the known values, got "),
        ("Integer value out of range", "has a number that is too large"),
        ("Number out of range", "has a number that is too large"),
    ):
        text = text.replace(theirs, ours, 1)
    return f"{place} {text}".strip()


def _kinds(text: str) -> str:
    kinds = text.split(" | ")
    return " or ".join(_WORDS.get(kind, kind) for kind in kinds if kind != "int" or "float" not in kinds)
