"""Calls from Python against bare passes and timm."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.parts.part import Options, Part, row, spread, unbounded
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

CALLS = {  # run: what it is called, what it is compared with, bound of the ratio
    "attention": ("explain, attention", "forward", 1.1),
    "relevance": ("explain, relevance", "forward + backward", 1.35),
    "load_model": ("load_model", "timm", 0.8),
}
SIDE, ROUNDS = 518, 20


def rows(options: Options) -> Iterator[Row]:
    """Measure calls of `explain` on a loaded model, and loading."""
    progress("calls")
    found = run_json(sys.executable, "bench.calls", str(SIDE), "5" if options.quick else str(ROUNDS))
    for name, seconds in found["seconds"].items():
        run, base, bound = CALLS.get(name, (name, None, None))
        head: Row = {"run": run, "ms": f"{seconds * 1e3:.0f}"}
        if base is None or bound is None:
            yield unbounded(head)
        else:
            ratio = found["ratios"][name]
            yield row(head, f"{spread(ratio)} x {base}", ratio[0], bound, f"<= {bound:g} x")


PART = Part(
    "Calls from Python against bare passes and timm",
    rows,
    protocol=(
        f"Calls: one process, a photo of {SIDE} x {SIDE} pixels; `explain` includes the preprocessing and the search for sinks. "
        "The backward pass goes to the pixels. Loading compares `load_model` with timm's `create_model(checkpoint_path=)`, from one local "
        "file. Ratios as for modules.",
    ),
    headlines=(("explain on a loaded model, last-layer attention, 518 px", r"explain, attention"),),
)
