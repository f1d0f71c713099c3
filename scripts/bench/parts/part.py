"""A part of the benchmark, and the rows of its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from visattn._support.tables import Row

SETTERS = "limit: ", "peer: ", "promise: "  # what may set a bound


@dataclass(frozen=True)
class Options:
    """Options of a run of the benchmark.

    Attributes:
        quick: Skip the largest size, and run fewer rounds.
        timm_train: Path of timm's train.py; None: leave it out.
    """

    quick: bool
    timm_train: Path | None


@dataclass(frozen=True)
class Part:
    """Part of the benchmark.

    Attributes:
        title: Title of its table.
        rows: Function that measures, and yields the rows.
        protocol: How it is measured, in sentences for the page.
        headlines: Rows that stand at the top of the page: a name, and the pattern at the beginning of the row.
    """

    title: str
    rows: Callable[[Options], Iterator[Row]]
    protocol: Sequence[str]
    headlines: Sequence[tuple[str, str]] = ()


def row(head: Row, measured: str, value: float, bound: float, limit: str, by: str) -> Row:
    """Return a row with its bound and verdict; `limit` starts with `<=` or `>=`.

    `by` tells what sets the bound: `limit: what no code can save`, `peer: its name`, or `promise: its reason`.
    """
    if not by.startswith(SETTERS):
        raise ValueError(f"what sets a bound must start with one of {SETTERS}, got '{by}'")
    kept = value >= bound if limit.startswith(">=") else value <= bound
    return {**head, "measured": measured, "bound": limit, "verdict": "ok" if kept else "over", "set by": by}


def unbounded(head: Row, measured: str | None = None) -> Row:
    """Return a row without a bound."""
    return {**head, "measured": measured, "bound": None, "verdict": None, "set by": None}


def spread(ratio: Sequence[float]) -> str:
    """Format a ratio and its interval."""
    return "{:.3f} ({:.3f} to {:.3f})".format(*ratio)


def megabytes(count: float) -> str:
    """Format bytes as MB."""
    return f"{count / 1e6:.0f}"
