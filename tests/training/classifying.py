"""A small training through the command line."""

from __future__ import annotations

from collections.abc import Callable

Classify = Callable[..., tuple[int, str, str]]


def told(err: str) -> str:
    """The one line of an error."""
    assert err.startswith("visattn: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("visattn: error: ").rstrip("\n")
