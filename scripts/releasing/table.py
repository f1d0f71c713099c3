"""The table of a release: sizes, Pythons, extras and tests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from releasing.building import Distributions
from releasing.record import Outcome, Record, failed

Row = tuple[str, str, str]  # what was tried, the result, size or time


def rows(files: Distributions, record: Record, root: Path, pythons: dict[str, str], extras: Iterable[str]) -> list[Row]:
    """Return the rows of the table; `pythons` names the part of each Python."""
    table = [(file.name, "built", f"{file.stat().st_size / 1e6:.2f} MB") for file in files]
    table += [(f"Python {version}", *_judged(record.outcomes(part))) for part, version in pythons.items()]
    here = {".".join(version.split(".")[:2]) for version in pythons.values()}
    table += [
        (f"Python {name}", "not on this machine; the hosted workflow tests it", "") for name in hosted(root) if name not in here
    ]
    table += [(f"extra {name}", *_judged(record.outcomes(f"extra {name}"))) for name in extras]
    return table


def suite(record: Record, parts: Iterable[str], version: str) -> Row:
    """Return the row of the tests of the source distribution."""
    outcomes = [one for part in parts for one in record.outcomes(part)]
    return f"tests of the source distribution, Python {version}", *_judged(outcomes)


def hosted(root: Path) -> list[str]:
    """Return the Pythons that the hosted workflow tests."""
    workflow = (root / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    found = re.search(r"^ *python: \[(.+)\]$", workflow, re.MULTILINE)
    return re.findall(r"[0-9.]+", found[1]) if found else []


def text(table: Iterable[Row]) -> str:
    """Return the table in aligned columns."""
    table = list(table)
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    return "\n".join(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:>8}".rstrip() for row in table)


def _judged(outcomes: list[Outcome]) -> tuple[str, str]:
    """Return the result and the seconds of a part."""
    if not outcomes:
        return "not tried", ""
    seconds = f"{sum(one.seconds for one in outcomes):.0f} s"
    if wrong := failed(outcomes):
        return f"FAILED: {wrong[0].name}: {wrong[0].last[:80]}", seconds
    return "ok", seconds
