"""Public modules, and what stands in the reference for each of their names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from types import FunctionType, GenericAlias, ModuleType, UnionType
from typing import Literal, get_args, get_origin


def packages() -> list[str]:
    """Return the public modules: the package, its public submodules, and their public submodules."""
    found = ["visattn"]
    for module in found:
        whole = import_module(module)
        found += [part.__name__ for name in whole.__all__ if isinstance(part := getattr(whole, name), ModuleType)]
    return found


_KINDS = {Mapping: "Dictionary", tuple: "Tuple", frozenset: "Set", str: "Text", int: "Whole number", float: "Number"}


def line(value: object, name: str = "") -> str:
    """Return the first line of a docstring; for values without one, their kind in words. `NETWORKS` holds networks, by its name."""
    if isinstance(value, (GenericAlias, UnionType)):
        return f"Type: {str(value).replace('|', 'or')}."
    text = inspect.getdoc(value) if callable(value) or isinstance(value, ModuleType) else None
    if text:
        return text.split("\n")[0]
    if get_origin(value) is Literal:
        return f"Type: {', '.join(map(repr, get_args(value)))}."
    kind = next((words for kind, words in _KINDS.items() if isinstance(value, kind)), type(value).__name__)
    if isinstance(value, (Mapping, tuple, frozenset)):
        return f"{kind} of {len(value)} {name.lower() if name.endswith('S') else 'entries'}."
    return f"{kind}."


def is_documented(value: object) -> bool:
    """Check whether a value has a docstring of its own: a class or a function."""
    return isinstance(value, (type, FunctionType)) and bool(value.__doc__)
