"""Optional dependencies: one sentence with the install line where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from visattn.errors import MissingExtra


def installed(module: str) -> bool:
    """Whether an optional dependency is there."""
    return find_spec(module) is not None


def need(module: str, extra: str, what: str) -> None:
    """Refuse to go on without an optional dependency.

    Raises:
        MissingExtra: If it is not installed.
    """
    if not installed(module):
        raise MissingExtra(f'{what} needs {module}, which is not installed. Run: pip install "visattn[{extra}]"')
