"""Validation of JSON from files of untrusted sources: types, sizes and nesting are checked against a shape before use.

A shape is a type; `{name: shape}` for an object, with `name?` for an optional name, or `{str: shape}` for any names; `[shape]` for a list
of any length; `(shape, ...)` for a list of this length; `Maybe` for a value that may be null; `dict` for an object with any
content, and `Free` for one of which some is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SIDE = 2**20  # largest integer: pixels, cells and tokens along one axis
LARGEST = 1e30  # magnitude of any number
_DEEPEST = 20  # nesting of objects and lists in a field of any content


@dataclass(frozen=True)
class Free:
    """A shape of an object that may have other plain values too."""

    shape: Any


@dataclass(frozen=True)
class Maybe:
    """A shape that may be null."""

    shape: Any


def check_shape(value: Any, shape: Any, name: str) -> None:  # noqa: ANN401 - JSON
    """Check JSON against a shape. Unknown names pass here and fail where they are used.

    Raises:
        ValueError: If the value has another shape; the message names the field.
    """
    if shape is dict:
        check_shape(value, {}, name)
        _check_plain(value, name, _DEEPEST)
    elif isinstance(shape, Free):
        check_shape(value, shape.shape, name)
        _check_plain(value, name, _DEEPEST)
    elif isinstance(shape, Maybe):
        if value is not None:
            check_shape(value, shape.shape, name)
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object")
        every = shape.get(str)
        for key in value if every else shape:
            if key.removesuffix("?") in value:
                check_shape(value[key.removesuffix("?")], every or shape[key], key.removesuffix("?"))
            elif not key.endswith("?"):
                raise ValueError(f"{name} must have '{key}'")
    elif isinstance(shape, (list, tuple)):
        if not isinstance(value, list) or (isinstance(shape, tuple) and len(value) != len(shape)):
            raise ValueError(f"{name} must be a list" + (f" of {len(shape)}" if isinstance(shape, tuple) else ""))
        for item, inner in zip(value, shape * len(value) if isinstance(shape, list) else shape, strict=True):
            check_shape(item, inner, name)
    elif shape is float:
        if type(value) not in (int, float) or not abs(value) < LARGEST:
            raise ValueError(f"{name} must be a finite number")
    elif type(value) is not shape or (shape is int and abs(value) > SIDE):
        raise ValueError(f"{name} must be {shape.__name__}")


def _check_plain(value: Any, name: str, depth: int) -> None:  # noqa: ANN401 - JSON
    """Check that numbers are finite, and that nesting is not too deep to be saved again."""
    if depth == 0:
        raise ValueError(f"{name} is nested too deeply")
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_plain(item, name, depth - 1)
    elif isinstance(value, (int, float)) and not abs(value) < LARGEST:
        raise ValueError(f"{name} must hold finite numbers")
