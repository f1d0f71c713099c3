"""Values of training settings: their types, and how TOML writes them."""

from __future__ import annotations

import json
from dataclasses import MISSING, Field
from typing import Any

from visattn._support.checks import printable, shown
from visattn.errors import OptionError


def of_type(item: Field[Any], value: Any, name: str) -> Any:  # noqa: ANN401
    """Convert a value to its setting's type. Integers are accepted as floats, and lists as tuples.

    Raises:
        OptionError: If the value has another type, or is text that cannot be encoded as UTF-8.
    """
    usual: Any = item.default_factory() if item.default is MISSING else item.default  # type: ignore[operator] # one of both is set
    wanted = type(usual)
    if wanted is float and (isinstance(value, float) or (type(value) is int and abs(value) < 2**53)):
        value = float(value)  # also converts NumPy scalars, which TOML would write differently
    if wanted is tuple and isinstance(value, list):
        value = tuple(value)
    fits = isinstance(value, wanted) and (wanted is not int or type(value) is int)
    if fits and wanted is tuple:
        each, length = item.metadata["each"], len(usual)
        value = tuple(float(one) if each is float and type(one) is int and abs(one) < 2**53 else one for one in value)
        fits = all(type(one) is each for one in value) and len(value) == (length or len(value))
    if not fits:
        kind = wanted.__name__
        if wanted is tuple:
            many = f"{len(usual)} values" if usual else "values"
            kind = f"tuple, {many} of type {item.metadata['each'].__name__}"
        raise OptionError(f"{name} must be of type {kind}, got {shown(value)}.")
    for text in value if wanted is tuple else (value,):
        if isinstance(text, str) and not _encodable(text):
            raise OptionError(f"{name} must be text that can be encoded as UTF-8, got '{printable(text)}'. Rename the file.")
    return value


def check_range(pair: tuple[float, ...], most: float, name: str) -> None:
    """Check the two ends of a range of positive numbers.

    Raises:
        OptionError: If they are not in order, or out of range.
    """
    low, high = pair
    if not 0 < low <= high <= most:
        raise OptionError(f"{name} must be two numbers in order, above 0 and at most {most:g}, got {low:g} and {high:g}.")


def _encodable(text: str) -> bool:
    """Check whether text can be encoded as UTF-8. Names of files may be arbitrary bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_toml(value: Any) -> str:  # noqa: ANN401
    """Return a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, str):
        quoted = json.dumps(value, ensure_ascii=False)
        return "".join(c if printable(c) == c else f"\\U{ord(c):08x}" for c in quoted)  # the file is also printed to the terminal
    return repr(value)


def storable(value: Any, depth: int = 4) -> bool:  # noqa: ANN401
    """Check whether TOML can store a value. `depth` limits the nesting of lists."""
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(storable(one, depth - 1) for one in value)
    if isinstance(value, str):
        return _encodable(value)
    return isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**63)
