"""Rows of facts as JSON, CSV, Markdown or aligned text: the one way in which the project prints tables."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def to_json(data: Any) -> str:  # noqa: ANN401 - any JSON value
    """`data` as indented JSON; a value JSON does not know is an error, never a string of its repr."""
    return json.dumps(data, indent=2, ensure_ascii=True, allow_nan=False)


def to_csv(rows: Sequence[Row]) -> str:
    """Rows as CSV with a header; a cell that a spreadsheet would run as a formula gets a leading quote."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"'{value}" if str(value)[:1] in "=+@" else value for key, value in row.items()})
    return stream.getvalue()


def to_markdown(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table."""
    if not rows:
        return ""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([_cell(row[key]) for key in head] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_text(rows: Sequence[Row]) -> str:
    """Rows as columns aligned with spaces, under a header."""
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
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
