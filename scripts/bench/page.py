"""The page of the benchmark in the docs, and the files with its tables beside it."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version

from pages import read_table, write_table

from bench.parts import PARTS
from bench.parts.processes import ROOT, settings
from bench.shared import THREADS
from visattn._support.tables import Row, to_markdown
from visattn.core.provenance import processor

DOCS = ROOT / "docs" / "benchmarks.md"
FILES = DOCS.with_suffix("")  # a table for each part
_LAST = "measured", "bound", "verdict", "set by"  # columns of each table
_WHERE = re.compile(r"^- Machine of (.+): (.+)\.$", re.MULTILINE)
_ALL = "all tables"
UNNAMED = "time", "differs"  # columns of text that do not name a row


def write(measured: Mapping[str, list[Row]]) -> None:
    """Write the page and its tables. Parts that were not measured in this run keep their tables, and their machine."""
    before = DOCS.read_text(encoding="utf-8") if DOCS.exists() else ""
    for name, rows in measured.items():
        write_table(FILES / f"{name}.csv", to_markdown(rows))
    where = {
        name: told for names, told in _WHERE.findall(before) for name in (PARTS if names == _ALL else names.split(", "))
    } | dict.fromkeys(measured, machine())
    tables = {name: read_table(FILES / f"{name}.csv") for name in PARTS if name in where}
    DOCS.write_text(document(tables, where), encoding="utf-8")


def document(tables: Mapping[str, str], where: Mapping[str, str]) -> str:
    """Return the docs page: headlines, exceeded bounds, and how each part was measured.

    Args:
        tables: The table of each part.
        where: The machine of each part.
    """
    kept, over = (sum(table.count(f"| {verdict} |") for table in tables.values()) for verdict in ("ok", "over"))
    intro = (
        "`make bench` measures this page anew, and fails if a bound is exceeded. Here "
        f"{over} of {kept + over} bounds are. `set by` tells what sets a bound: a limit that no code can pass, a peer, or a "
        "promise. `plain` is the model's forward pass without visattn. `scripts/benchmark.py --write-docs` writes each table from one run."
    )
    shown = [
        f"## {PARTS[name].title}\n\n{_link(name, f'{len(table.splitlines()) - 2} rows')}. {' '.join(PARTS[name].protocol)}\n"
        for name, table in tables.items()
    ]
    how = "\n".join(["## How it was measured\n", *(f"- {line}" for line in (*machines(where), *protocol())), ""])
    further = exceeded(tables)
    listed = ["Further bounds that are exceeded:\n", to_markdown(further)] if further else []
    return "\n".join(["# Benchmarks\n", f"{intro}\n", to_markdown(headlines(tables)), *listed, how, *shown])


def machine() -> str:
    """Return the processor, and how many of them."""
    return f"{processor()}, {os.cpu_count()} CPUs"


def machines(where: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each machine: what was measured on it."""
    for told in dict.fromkeys(where.values()):
        names = [name for name, one in where.items() if one == told]
        yield f"Machine of {_ALL if len(names) == len(where) else ', '.join(names)}: {told}."


def headlines(tables: Mapping[str, str]) -> list[Row]:
    """Return the measured headlines, each with the last cells of its table."""
    return [{"what": what, **_told(tables[name], line)} for name, what, line in _headlines(tables)]


def exceeded(tables: Mapping[str, str]) -> list[Row]:
    """Return further rows whose bound is exceeded, each with its name: the cells of text before the last ones, and the pixels."""
    above = {(name, line) for name, _, line in _headlines(tables)}
    rows: list[Row] = []
    for name, table in tables.items():
        for line in table.splitlines()[2:]:
            told = _told(table, line)
            if told.pop("verdict") == "over" and (name, line) not in above:
                heads = [head for head in _cells(table.splitlines()[0]) if head not in (*_LAST, *UNNAMED)]
                named = dict(zip(_cells(table.splitlines()[0]), _cells(line), strict=True))
                words = [f"{named[head]} px" if head == "px" else named[head] for head in heads]
                words = [word for word in words if re.search(r"[^\d.,]", word)]
                rows.append({"what": f"{_link(name, name)}: {', '.join(words)}", **told})
    return rows


def _headlines(tables: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the part, the name and the line of each headline that was measured."""
    for name, table in tables.items():
        for what, start in PARTS[name].headlines:
            found = re.search(rf"^\| {start} \|.*$", table, re.MULTILINE)
            if found and _told(table, found[0])["measured"]:  # timm's train.py is not always there to compare with
                yield name, what, found[0]


def _link(name: str, text: str) -> str:
    """Return a link to the table of a part."""
    return f"[{text}]({FILES.name}/{name}.csv)"


def _told(table: str, line: str) -> dict[str, str]:
    """Return the last cells of a line; a table that was measured before a column came has none there."""
    named = dict(zip(_cells(table.splitlines()[0]), _cells(line), strict=True))
    return {head: named.get(head, "") for head in _LAST}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def protocol() -> list[str]:
    """Return lines about the machine and about how all parts are measured."""
    names = ("visattn", "torch", "torchvision", "timm", "opencv-python", "pillow", "numpy")
    return [
        f"PyTorch on {THREADS} threads if nothing else is said; {platform.system()}. CUDA is not measured.",
        f"Versions: Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in names)}.",
        "Model, if no other is named: DINOv2 ViT-S/14 with its real weights, float32, inference mode, batch 1, on a real photo.",
        "Ratios come from one series. With an interval, they are the median over rounds and its 95 % confidence interval. The bound "
        "applies to the median.",
        f"Where times are compared, no memory returns to the system (`{settings('keeps')}`). Where peaks are compared, each large tensor "
        f"returns at once (`{settings('apart')}`).",
    ]
