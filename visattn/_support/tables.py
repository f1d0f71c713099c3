"""Tables as JSON, CSV, Markdown or aligned text; all tables of the project are printed with these functions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from visattn._support.checks import printable

Row = Mapping[str, Any]

# files of the statistics of heads
STATISTICS = "heads.csv", "layers.csv", "gates.csv", "photos.csv", "stats.json", "distance.png", "entropy.png", "mass.png"


def to_json(data: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return `data` as indented JSON; raise for values that JSON cannot represent."""
    return json.dumps(data, indent=2, ensure_ascii=True, allow_nan=False)


def without_nan(data: Any) -> Any:  # noqa: ANN401 - numbers in lists and objects
    """Return JSON data with None for NaN, which JSON lacks."""
    if isinstance(data, dict):
        return {name: without_nan(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [without_nan(value) for value in data]
    return None if isinstance(data, float) and math.isnan(data) else data


def to_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV with a header; text that a spreadsheet would run as a formula gets a leading quote."""
    lines = [list(rows[0]), *(row.values() for row in rows)] if rows else []
    return "".join(",".join(map(_csv_cell, line)) + "\n" for line in lines)


def to_markdown(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table."""
    if not rows:
        return ""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([_cell(row[key]).replace("|", "\\|") for key in head] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_text(rows: Sequence[Row]) -> str:
    """Return rows as columns aligned with spaces, under a header."""
    if not rows:
        return ""
    head = list(rows[0])
    lines = [head, *([_cell(row[key]) for key in head] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else printable(str(value).replace("\n", " "))


def _csv_cell(value: object) -> str:
    text = "" if value is None else str(value)
    if isinstance(value, str) and text[:1] in ("=", "+", "-", "@", "\t", "\r"):
        text = f"'{text}"
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\r\n') else text
