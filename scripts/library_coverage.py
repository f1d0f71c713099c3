"""Coverage of other libraries: attention that visattn records and places in a tiny model of every class that reads an image.

Prints tables; --write-docs also writes them to docs/libraries.md and the files beside it. Exits 1 if a capture fails, an output
changes, or a token lies elsewhere than the recording says.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from libraries.sweep import COLUMNS, examined, finite, output
from pages import folded, section_of, write_section

from visattn._support.tables import to_markdown, to_text

DOCS = Path(__file__).parents[1] / "docs" / "libraries.md"
NAMED = {"transformers": "Classes", "torchvision": "Architectures", "open_clip": "Architectures", "diffusers": "Models"}
Row = dict[str, Any]


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; by default all")
    parser.add_argument("--library", action="append", choices=list(NAMED), help="only the models of this library")
    parser.add_argument(
        "--write-docs", action="store_true", help=f"replace the tables in docs/{DOCS.name} and in the files beside it"
    )
    options = parser.parse_args()
    if options.names and options.write_docs:
        parser.error("--write-docs needs all models of a library")
    wrong = False
    for library in options.library or NAMED:
        rows = _rows(library, options.names)
        built = [{key: value for key, value in row.items() if key != "not built"} for row in rows if not row["not built"]]
        left_out = [{"model": row["model"], "why": row["not built"]} for row in rows if row["not built"]]
        sums = totals(library, built, left_out)
        for table in (built, left_out, sums):
            print(to_text(table), flush=True)
        if options.write_docs:
            tables = {f"{NAMED[library]}, one row each": built, "Not built": left_out}
            write_section(DOCS, "totals", with_totals(section_of(DOCS, "totals"), library, sums))
            folds = [folded(summary, to_markdown(table)) for summary, table in tables.items() if table]
            write_section(DOCS, library, "".join(folds), into_files=True)
        wrong = wrong or any(row["wrong"] or row["failed"] or row["output"] == "DIFFERENT" for row in built)
    return int(wrong)


def _rows(library: str, names: Sequence[str]) -> list[Row]:
    """Examine the models of a library, as many beside each other as there are CPUs."""
    chosen = [(library, name, kind) for name, kind in _models(library).names().items() if not names or name in names]
    with get_context("spawn").Pool(os.cpu_count(), _quiet, maxtasksperchild=60) as pool:
        return list(pool.imap(_row, chosen, chunksize=1))


def _models(library: str) -> Any:  # noqa: ANN401
    """Import the module that builds the models of a library."""
    return import_module(f"libraries.{library}_models")


def _quiet() -> None:
    """Prepare a process of the pool."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)


def _row(chosen: tuple[str, str, str]) -> Row:
    """Return the row of a model; if it does not run at this size, the reason under `not built`."""
    library, name, kind = chosen
    models, started = _models(library), time.perf_counter()
    row: Row = {"model": name, "kind": kind, "not built": models.LEFT_OUT.get(name, ""), "failed": ""}
    row |= dict.fromkeys(COLUMNS, "") | {"calls": 0, "placed": 0}
    try:
        if not row["not built"]:
            model, inputs = models.build(name)
            plain = output(model, inputs)
            if not finite(plain):
                row["not built"] = "its random weights give NaN"
    except Exception as error:  # of the library, for settings of ours
        row["not built"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    try:
        row |= {} if row["not built"] else examined(model, inputs, plain)
    except Exception as error:  # a fault of visattn
        row["failed"] = f"{type(error).__name__}: {error}"
    print(f"{time.perf_counter() - started:6.1f} s  {name}  {row['not built'] or row['failed']}", file=sys.stderr, flush=True)
    gc.collect()
    return row


def totals(library: str, rows: list[Row], left_out: list[Row]) -> list[Row]:
    """Compute the totals of the table of a library."""
    calls, placed = (sum(row[key] or 0 for row in rows) for key in ("calls", "placed"))
    attentive = [row for row in rows if row["calls"]]
    cells, tokens = ([tuple(map(int, row[key].split(" of "))) for row in rows if row[key]] for key in ("lit cells", "lit tokens"))
    wrong = sum(len(row["wrong"].split("; ")) for row in rows if row["wrong"])
    found = {
        "version": _models(library).VERSION,
        "models": len(rows) + len(left_out),
        "built at a small size": len(rows),
        "with softmax attention": len(attentive),
        "of these, with every call placed": sum(row["calls"] == row["placed"] for row in attentive),
        "calls": calls,
        "calls placed": f"{placed} ({placed / max(calls, 1):.1%})",
        "cells of the image lit, and found where the recording says": sum(right for right, _ in cells),
        "words and queries changed, and found under their names": sum(right for right, _ in tokens),
        "lit or changed without effect": sum(tried - right for right, tried in (*cells, *tokens)) - wrong,
        "found elsewhere": wrong,
        "outputs changed": sum(row["output"] == "DIFFERENT" for row in rows),
        "captures that failed": sum(bool(row["failed"]) for row in rows),
    }
    return [{"what": what, "number": number} for what, number in found.items()]


def with_totals(table: str, library: str, sums: list[Row]) -> str:
    """Return the table of all totals, a column for each library, with the totals of one replaced."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    standing = {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines}
    rows: list[Row] = []
    for row in sums:
        found = standing.get(row["what"], {}) | {library: row["number"]}
        rows.append({"what": row["what"], **{name: found.get(name, "") for name in NAMED}})
    return to_markdown(rows)


if __name__ == "__main__":
    sys.exit(main())
