"""Packages whose public names are imported on first use (PEP 562), so that a command or a plain call loads only what it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def face(package: str, names: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: The package.
        names: Module, relative to the package if it begins with a dot, and the names that it gives; of the module `.`, names of modules.

    Returns:
        The three, to assign in the package.
    """
    modules = {name: module for module, given in names.items() for name in given}

    def get(name: str) -> Any:  # noqa: ANN401
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == ".":
            return import_module(f"{package}.{name}")
        return getattr(import_module(modules[name], package), name)

    return get, lambda: sorted(modules), sorted(modules)


class Later:
    """Module that is imported when something of it is first asked for; type checkers see a plain import."""

    def __init__(self, name: str) -> None:
        """Store the name of the module."""
        self._name = name

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return what the module has under a name."""
        return getattr(import_module(self._name), name)
