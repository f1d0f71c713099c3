"""Fields of records that are options: with what commands say of them."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, text: str, *, metavar: str | None = None, least: int | None = None) -> Any:  # noqa: ANN401 - of any type
    """A field with what commands say of it.

    Args:
        default: Its default.
        text: One line for `--help`.
        metavar: What stands for its value there.
        least: The least number that commands take.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar, "least": least})
