"""Captions by beam search against a loop over pictures."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.parts.part import Options, Part, row, spread, unbounded
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

RATIO = 4.0  # bound, relative to the loop's captions/s
ROUNDS = 20


def rows(options: Options) -> Iterator[Row]:
    """Measure batched beam search, and loops over images that find the same captions."""
    progress("captions of 64 scenes")
    found = run_json(sys.executable, "bench.captions", "3" if options.quick else str(ROUNDS), allocator="keeps")
    pictures = found["pictures"]
    runs = {"ours": "visattn search", "loop": "loop over pictures", "loop, keys once": "loop over pictures, keys once"}
    for name, run in runs.items():
        ratio = found["ratios"].get(name)
        head: Row = {"run": run, "captions/s": f"{pictures / found['seconds'][name]:.1f}"}
        if name == "loop":
            yield row(
                head, f"visattn is {spread(ratio)} x as fast", ratio[0], RATIO, f">= {RATIO:g} x", "peer: the loop of tutorials"
            )
        elif ratio:
            yield unbounded(head, f"visattn is {spread(ratio)} x as fast")
        else:
            alike = f"{found['alike']} of {pictures} captions identical in all, {found['steps']:.1f} steps each"
            yield row(head, alike, found["alike"], pictures, f">= {pictures}", "promise: the same captions")


PART = Part(
    "Captions by beam search",
    rows,
    protocol=(
        "Show, attend and tell with soft attention, trained briefly; 64 scenes of 64 px in one batch, beam size 5. "
        "The loop has the shape of the usual tutorials: one image at a time, features copied for each hypothesis, and new attention keys "
        "at each step. `keys once` computes the keys once.",
    ),
    headlines=(("captions by beam search, against a loop over pictures", r"loop over pictures"),),
)
