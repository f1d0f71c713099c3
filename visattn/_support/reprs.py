"""Short reprs of objects that hold arrays: a notebook shows them on a line or two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from visattn._support.checks import printable

LONGEST = 400  # characters
_TEXT, _ITEMS = 40, 4  # longest text, and number of items, of one value


def brief(self: Any) -> str:  # noqa: ANN401 - becomes a method `__repr__`
    """Return the class and fields of a dataclass or named tuple; arrays are shown by dtype and shape, long values are cut.

    Empty fields are left out.
    """
    names = [field.name for field in fields(self)] if is_dataclass(self) else self._fields
    parts = [f"{name}={short(value)}" for name in names if (value := getattr(self, name)) is not None and _holds(value)]
    text = f"{type(self).__name__}({', '.join(parts)})"
    return text if len(text) <= LONGEST else text[: LONGEST - 2] + "…)"


def in_pixels(size: Sequence[float]) -> str:
    """Return a size `(height, width)` as people write it, the width first."""
    return f"{size[1]:g} x {size[0]:g}"


def short(value: Any) -> str:  # noqa: ANN401
    """Return a short repr of one value."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, str):
        return repr(printable(value) if len(value) <= _TEXT else printable(value[: _TEXT - 1]) + "…")
    if isinstance(value, Mapping):
        shown = ", ".join(f"{printable(str(key))[:_TEXT]}: {short(item)}" for key, item in list(value.items())[:_ITEMS])
        return "{" + shown + (", …" if len(value) > _ITEMS else "") + "}"
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        shown = ", ".join(short(item) for item in value[:_ITEMS])
        return f"({shown}, … {len(value)} in all)" if len(value) > _ITEMS else f"({shown})"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    text = repr(value)
    return printable(text) if len(text) <= 2 * _TEXT else f"<{type(value).__name__}>"


def in_runs(names: Sequence[str], between: str = ", ") -> str:
    """Join names; more than four that are numbered one after the other are told by the first and the last."""
    runs: list[list[str]] = []
    last = "", -1
    for name in names:
        stem = name.rstrip("0123456789")
        if (this := (stem, int(name[len(stem) :] or -1))) == (last[0], last[1] + 1) and runs:
            runs[-1].append(name)
        else:
            runs.append([name])
        last = this
    return between.join(between.join(run) if len(run) <= _ITEMS else f"{run[0]} to {run[-1]}" for run in runs)


def _holds(value: Any) -> bool:  # noqa: ANN401
    return bool(len(value)) if isinstance(value, (str, tuple, list, Mapping)) else True
