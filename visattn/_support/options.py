"""Dataclass fields that are also command line options."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, text: str, *, metavar: str | None = None, least: int | None = None, decides: bool = True) -> Any:  # noqa: ANN401 - of any type
    """Create a dataclass field with metadata for the command line.

    Args:
        default: Default value.
        text: One line for `--help`.
        metavar: Placeholder of the value in `--help`.
        least: Smallest number that the command line accepts.
        decides: Whether results depend on it.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar, "least": least, "decides": decides})
