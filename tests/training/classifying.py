"""Small training runs from the command line."""

from __future__ import annotations

from collections.abc import Callable

Classify = Callable[..., tuple[int, str, str]]


def told(err: str) -> str:
    """Check that stderr is a single error line, and return it."""
    assert err.startswith("visattn: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("visattn: error: ").rstrip("\n")
