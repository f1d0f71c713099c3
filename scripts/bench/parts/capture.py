"""Capture alone against the plain forward pass."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from itertools import product

from bench.parts.part import Options, Part, row, unbounded
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

LATER = {
    "vit_small_patch16_224": 1.05,
    "swin_tiny_patch4_window7_224": 1.1,
    "cait_xxs24_224": 1.1,
}  # bounds, relative to the plain forward pass
FIRST = 1.9  # bound, relative to the plain forward pass
LARGE_FIRST, LARGE_LATER = 3.0, 1.05  # bounds for models of transformers at their real width
BY = {
    "first": "promise: two passes, of which one is traced",
    "later": "limit: the pass; each call is compared with the tape in Python",
}
SETTINGS = (1, 2), (1, 1), (2, 1)  # (threads, batch size); only the first has a bound


def rows(options: Options) -> Iterator[Row]:
    """Measure captures without a method, for models with large layers and with many small ones."""
    for (name, bound), (threads, batch) in product(LATER.items(), SETTINGS):
        progress(f"{name}, {threads} threads, batch {batch}")
        rounds = "10" if options.quick else "40"
        found = run_json(sys.executable, "bench.capture", name, str(threads), str(batch), rounds, allocator="keeps")
        head: Row = {"model": name, "threads": threads, "batch": batch, "plain ms": f"{found['seconds'] * 1e3:.1f}"}
        yield capture_row(head, "first", found["first"], FIRST)
        yield capture_row(head, "later", found["capture"], bound)
        yield unbounded({**head, "capture": "gradient of the readout, from the tape"}, f"{found['proven']:.3f} x plain")
        yield unbounded({**head, "capture": "pass that measures the readout"}, f"{found['measured']:.3f} x plain")
    progress("models of transformers")
    for found in run_json(sys.executable, "bench.libraries", "3" if options.quick else "15", allocator="keeps"):
        head = {"model": found["model"], "threads": 1, "batch": found["batch"], "plain ms": f"{found['seconds'] * 1e3:.1f}"}
        yield capture_row(head, "first", found["first"], LARGE_FIRST)
        yield capture_row(head, "later", found["later"], LARGE_LATER)
    progress("every model of the coverage sweep")
    sweep = run_json(sys.executable, "bench.capture_sweep", "2" if options.quick else "3", allocator="keeps")
    head = {"model": f"all {len(sweep)} of the coverage sweep", "threads": 1, "batch": 2, "plain ms": ""}
    for what in ("first", "later"):
        ratios = [one[what] for one in sweep.values()]
        parts = statistics.quantiles(ratios, n=10)
        text = f"median {statistics.median(ratios):.3f}, four of five in {parts[0]:.3f} to {parts[-1]:.3f}"
        text += f", largest {max(ratios):.3f} x plain"
        yield unbounded({**head, "capture": what}, text)
    known = sum(one["remembered"] for one in sweep.values())
    yield unbounded({**head, "capture": "later, token positions reused"}, f"{known} of {len(sweep)} models")


def capture_row(head: Row, what: str, ratio: float, limit: float) -> Row:
    """Return the row of a first or a later capture; only the first setting has a bound."""
    head, measured = {**head, "capture": what}, f"{ratio:.3f} x plain"
    if (head["threads"], head["batch"]) == SETTINGS[0]:
        return row(head, measured, ratio, limit, f"<= {limit:g} x", BY[what])
    return unbounded(head, measured)


PART = Part(
    "Capture alone against the plain forward pass",
    rows,
    protocol=(
        "Random weights, 224 px. The `first` capture traces the tokens. A `later` one is compared with it, operation by operation, and "
        "traces nothing anew. Its cost is mostly Python, so the ratio is larger for a short forward pass, and is bounded with one thread. "
        "The first capture includes the gradient of the readout.",
    ),
    headlines=(("later capture alone, all models of the coverage sweep", r"all .*? \| later"),),
)
