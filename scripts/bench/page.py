"""The page of the benchmark in the docs."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version

from pages import folded

from bench.parts import PARTS
from bench.parts.processes import ROOT, settings
from bench.shared import THREADS
from visattn._support.tables import Row, to_markdown
from visattn.core.provenance import processor

DOCS = ROOT / "docs" / "benchmarks.md"
SHORT = 10  # tables with more rows are folded
_LAST = "measured", "bound", "verdict", "set by"  # columns of each table
_MEASURED = "Measured on"
_SECTION = re.compile(rf"^## (.+)\n\n({_MEASURED} .+)\n\n(?:<details>.+\n\n)?((?:\|.*\n)+)", re.MULTILINE)
UNNAMED = "time", "differs"  # columns of text that do not name a row


def document(measured: dict[str, list[Row]]) -> str:
    """Return the docs page: headlines, tables, protocol. Parts that were not measured in this run keep their tables, and their machine."""
    before = DOCS.read_text(encoding="utf-8") if DOCS.exists() else ""
    standing = {title: (where, table) for title, where, table in _SECTION.findall(before)}
    found = {
        part.title: (f"{_MEASURED} {machine()}.", to_markdown(measured[name])) if name in measured else standing.get(part.title)
        for name, part in PARTS.items()
    }
    sections = {title: section for title, section in found.items() if section is not None}
    tables = {title: table for title, (_, table) in sections.items()}
    kept, over = (sum(table.count(f"| {verdict} |") for table in tables.values()) for verdict in ("ok", "over"))
    intro = (
        "Run `make bench` to measure everything anew; it fails if a bound is exceeded. In the runs below, "
        f"{over} of {kept + over} bounds are exceeded, and listed. What sets a bound stands beside it: a limit that no code can "
        "pass, a peer, or a promise. The word `plain` stands for the model's forward pass without visattn. The page is written by "
        "`scripts/benchmark.py --write-docs`, each table from one run and with the bounds of that run: [how it was "
        "measured](#how-it-was-measured)."
    )
    shown = [f"## {title}\n\n{where}\n\n{shortened(table)}" for title, (where, table) in sections.items()]
    how = "\n".join(["## How it was measured\n", *(f"- {line}" for line in protocol()), ""])
    broken = exceeded(tables)
    listed = ["Exceeded bounds:\n", to_markdown(broken)] if broken else []
    return "\n".join(["# Benchmarks\n", f"{intro}\n", to_markdown(headlines(tables)), *listed, *shown, how])


def machine() -> str:
    """Return the processor, and how many of them."""
    return f"{processor()}, {os.cpu_count()} CPUs"


def headlines(tables: Mapping[str, str]) -> list[Row]:
    """Return the measured headlines, each with the last cells of its table."""
    rows: list[Row] = []
    for part in PARTS.values():
        table = tables.get(part.title, "")
        for name, start in part.headlines:
            if found := re.search(rf"^\| {start} \|.*$", table, re.MULTILINE):
                told = _told(table, found[0])
                if told["measured"]:  # timm's train.py is not always there to compare with
                    rows.append({"what": name, **told})
    return rows


def exceeded(tables: Mapping[str, str]) -> list[Row]:
    """Return the rows whose bound is exceeded, each with its name: the cells of text before the last ones, and the pixels."""
    rows: list[Row] = []
    for title, table in tables.items():
        for line in table.splitlines()[2:]:
            told = _told(table, line)
            if told["verdict"] == "over":
                heads = [head for head in _cells(table.splitlines()[0]) if head not in (*_LAST, *UNNAMED)]
                named = dict(zip(_cells(table.splitlines()[0]), _cells(line), strict=True))
                words = [f"{named[head]} px" if head == "px" else named[head] for head in heads]
                words = [word for word in words if re.search(r"[^\d.,]", word)]
                rows.append({"what": f"{title}: {', '.join(words)}", **told})
    return rows


def _told(table: str, line: str) -> dict[str, str]:
    """Return the last cells of a line; a table that was measured before a column came has none there."""
    named = dict(zip(_cells(table.splitlines()[0]), _cells(line), strict=True))
    return {head: named.get(head, "") for head in _LAST}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def shortened(table: str) -> str:
    """Return a table; a long one is put into a fold."""
    rows = table.count("\n") - 2
    return table if rows <= SHORT else folded(f"Table of {rows} rows", table)


def protocol() -> list[str]:
    """Return lines about the machine and about how each part is measured."""
    names = ("visattn", "torch", "torchvision", "timm", "opencv-python", "pillow", "numpy")
    return [
        f"Machine: named at each table, here {machine()}. PyTorch on {THREADS} threads if nothing else is said, OpenCV on its default; "
        f"{platform.system()}.",
        f"Versions: Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in names)}.",
        "CUDA: not measured; everything here ran on the CPU.",
        "Model: DINOv2 ViT-S/14 with its real weights, float32, inference mode, batch 1. The image is a real photo squeezed to a square.",
        f"Allocator: with `keeps`, no memory returns to the system ({settings('keeps')}). This leaves out the time of allocating it "
        f"again. It is set where times are compared. With `apart` ({settings('apart')}), each large tensor returns at once. A peak then "
        "counts live tensors, not holes in the heap. It is set where peaks are compared. The plain forward pass has the same setting.",
        *(line for part in PARTS.values() for line in part.protocol),
    ]
