"""Checks for optional dependencies; the error says how to install a missing one."""

from __future__ import annotations

from importlib.util import find_spec

from visattn.errors import MissingExtra


def installed(module: str) -> bool:
    """Check whether an optional dependency is installed."""
    return find_spec(module) is not None


def need(module: str, extra: str, what: str) -> None:
    """Check that an optional dependency is installed.

    Raises:
        MissingExtra: If it is not installed.
    """
    if not installed(module):
        raise MissingExtra(
            f'{what} needs {module}, which is not installed. In the source folder of visattn, run: pip install -e ".[{extra}]"'
        )
