"""Coverage of transformers: attention that visattn records and places in a tiny model of every class that reads an image.

Prints a table; --write-docs also writes it to docs/libraries.md. Exits 1 if a capture fails, an output changes, or a token lies
elsewhere than the recording says.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from libraries import transformers_models
from libraries.sweep import COLUMNS, examined

from visattn._support.tables import to_markdown, to_text

DOCS = Path(__file__).parents[1] / "docs" / "libraries.md"


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="classes; by default all")
    parser.add_argument("--write-docs", action="store_true", help=f"replace the tables in docs/{DOCS.name}")
    options = parser.parse_args()
    chosen = [item for item in transformers_models.names().items() if not options.names or item[0] in options.names]
    with get_context("spawn").Pool(os.cpu_count(), _quiet, maxtasksperchild=20) as pool:
        made = list(pool.imap(_row, chosen, chunksize=1))
    rows = [{key: value for key, value in row.items() if key != "not built"} for row in made if not row["not built"]]
    left_out = [{"class": row["class"], "why": row["not built"]} for row in made if row["not built"]]
    tables = {"transformers": rows, "left out": left_out, "totals": totals(rows, left_out)}
    for table in tables.values():
        print(to_text(table))
    if options.write_docs:
        text = DOCS.read_text()
        for mark, table in tables.items():
            text = re.sub(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", rf"\1\n{to_markdown(table)}\n\2", text, flags=re.DOTALL)
        DOCS.write_text(text)
    return int(any(row["wrong"] or row["failed"] or row["output"] != "same" for row in rows))


def _quiet() -> None:
    """Prepare a process of the pool."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)


def _row(chosen: tuple[str, str]) -> dict[str, Any]:
    """Return the row of a class; if its tiny configuration does not run, the reason under `not built`."""
    name, task = chosen
    started = time.perf_counter()
    row: dict[str, Any] = {"class": name, "task": task, "not built": transformers_models.LEFT_OUT.get(name, ""), "failed": ""}
    row |= dict.fromkeys(COLUMNS, "") | {"calls": 0, "placed": 0}
    try:
        if not row["not built"]:
            model, inputs = transformers_models.build(name)
            with torch.no_grad():
                out = model(**inputs)
            if not all(
                bool(x.isfinite().all()) for x in out.values() if isinstance(x, torch.Tensor) and x.dtype == torch.float32
            ):
                row["not built"] = "its random weights give NaN"
    except Exception as error:  # of the library, for settings of ours
        row["not built"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    try:
        row |= {} if row["not built"] else examined(model, inputs)
    except Exception as error:  # a fault of visattn
        row["failed"] = f"{type(error).__name__}: {error}"
    print(f"{time.perf_counter() - started:6.1f} s  {name}  {row['not built'] or row['failed']}", file=sys.stderr, flush=True)
    gc.collect()
    return row


def totals(rows: list[dict[str, Any]], left_out: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute the totals of the table."""
    calls, placed = (sum(row[key] or 0 for row in rows) for key in ("calls", "placed"))
    attentive = [row for row in rows if row["calls"]]
    whole = [row for row in attentive if row["calls"] == row["placed"]]
    found = [row["lit cells"].split(" of ") for row in rows if row["lit cells"]]
    return [
        {"what": "transformers", "number": transformers.__version__},
        {"what": "classes that read an image", "number": len(rows) + len(left_out)},
        {"what": "built at a tiny size", "number": len(rows)},
        {"what": "with softmax attention", "number": len(attentive)},
        {"what": "of these, with every call placed", "number": len(whole)},
        {"what": "calls", "number": calls},
        {"what": "calls placed", "number": f"{placed} ({placed / max(calls, 1):.0%})"},
        {"what": "cells lit, and found where the recording says", "number": sum(int(right) for right, _ in found)},
        {"what": "cells lit that changed nothing", "number": sum(int(all_) - int(right) for right, all_ in found) - _wrong(rows)},
        {"what": "cells found elsewhere", "number": _wrong(rows)},
        {"what": "outputs changed", "number": sum(row["output"] != "same" for row in rows)},
        {"what": "captures that failed", "number": sum(bool(row["failed"]) for row in rows)},
    ]


def _wrong(rows: list[dict[str, Any]]) -> int:
    return sum(len(row["wrong"].split("; ")) for row in rows if row["wrong"])


if __name__ == "__main__":
    sys.exit(main())
