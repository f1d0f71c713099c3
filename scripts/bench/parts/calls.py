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
SMALL = {"capture": 1.45, "explain, attention": 2.5, "explain, relevance": 4.0}  # bounds, relative to the plain forward pass
SMALL_ROUNDS = 200
BY = {
    "attention": "limit: the pass, and one row of weights",
    "relevance": "limit: both passes, and a product of matrices for each layer",
    "load_model": "peer: timm",
}


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
            yield row(head, f"{spread(ratio)} x {base}", ratio[0], bound, f"<= {bound:g} x", BY[name])
    progress("small calls")
    seconds_of = run_json(sys.executable, "bench.small", "20" if options.quick else str(SMALL_ROUNDS), allocator="keeps")
    for run, seconds in seconds_of.items():
        head, ratio = {"run": f"{run}, ViT-Ti at 64 px", "ms": f"{seconds * 1e3:.1f}"}, seconds / seconds_of["plain forward"]
        if run in SMALL:
            why = "limit: Python of an interception, and of the comparison with the tape"
            yield row(head, f"{ratio:.3f} x forward", ratio, SMALL[run], f"<= {SMALL[run]:g} x", why)
        else:
            yield unbounded(head, None if ratio == 1 else f"{ratio:.3f} x forward")


PART = Part(
    "Calls from Python",
    rows,
    protocol=(
        f"A photo of {SIDE} x {SIDE} pixels. `explain` includes the preprocessing and the search for sinks; the backward pass goes to the "
        "pixels. Loading compares `load_model` with timm's `create_model(checkpoint_path=)`. Small calls: timm's "
        "ViT-Ti with 64 px, batch 1, one thread, so that Python and not arithmetic decides; the minimum of "
        f"{SMALL_ROUNDS} rounds. An empty function mode is what any interception costs.",
    ),
    headlines=(("explain on a loaded model, last-layer attention, 518 px", r"explain, attention"),),
)
