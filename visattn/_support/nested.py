"""Values inside lists, tuples, dictionaries and dataclasses, by path: `batch.rgb`, `views.1`.

`torch.utils._pytree` knows no dataclass unless its class is registered for the whole process, so it is not used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from visattn._support.checks import printable

__all__ = ["described", "leaves", "mapped"]

_MOST = 8  # parts in a message
_DEEPEST = 20  # levels; a container may hold itself


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield the path and the value of everything that is no container, in order.

    Args:
        value: A value, perhaps a container.
        path: Path of the value itself.
    """
    parts = _parts(value, path)
    if parts is None:
        yield path, value
        return
    for key, part in parts.items():
        yield from leaves(part, _joined(path, key))


def described(value: Any) -> str:  # noqa: ANN401
    """Return the type of a value and, of a container, the path and the shape or type of what is inside, as `dict with out (1, 10)`."""
    inside = [f"{path} {_shape(leaf)}" for path, leaf in leaves(value) if path][: _MOST + 1]
    more = ", …" * (len(inside) > _MOST)
    return type(value).__name__ + (f" with {printable(', '.join(inside[:_MOST]))}{more}" if inside else "")


def _shape(leaf: object) -> str:
    return str(tuple(leaf.shape)) if hasattr(leaf, "shape") else type(leaf).__name__


def mapped(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:  # noqa: ANN401
    """Return a value with `change(path, leaf)` in place of each leaf. Containers that change are copied; they keep their types.

    Args:
        value: A value, perhaps a container; it is not changed.
        change: Function from the path and the value of a leaf to its new value.
        path: Path of the value itself.
    """
    parts = _parts(value, path)
    if parts is None:
        return change(path, value)
    changed = {key: mapped(part, change, _joined(path, key)) for key, part in parts.items()}
    return value if all(changed[key] is part for key, part in parts.items()) else _rebuilt(value, changed)


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _parts(value: Any, path: str) -> Mapping[Any, Any] | None:  # noqa: ANN401
    """Return the parts of a container by key, index or name of a field; None for anything else."""
    if path.count(".") >= _DEEPEST:
        return None
    if isinstance(value, Mapping):
        return value
    names = getattr(value, "_fields", None)
    if isinstance(value, tuple) and names is not None:
        return dict(zip(names, value, strict=True))
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return None


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:  # noqa: ANN401
    """Return a container like another one, with these parts. No constructor of a dataclass runs: it may compute or refuse."""
    if isinstance(value, tuple):
        return getattr(value, "_make", tuple)(parts.values())
    if is_dataclass(value) and not isinstance(value, Mapping):
        made = copy.copy(value)
        for name, part in parts.items():
            object.__setattr__(made, name, part)  # a frozen one too
        return made
    try:
        made = copy.copy(value)
        for key, part in parts.items():
            made[key] = part
    except TypeError:  # a mapping that cannot be written
        return parts
    return made
