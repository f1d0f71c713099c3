"""Cost of metrics of maps: deletion beside a plain loop, and beside Quantus."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator

from bench.measuring import ratio
from bench.parts.part import Options, Part, row, spread
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

BOUNDS = {224: 1.05, 64: 0.5}  # of the time, relative to a loop of one input at a time, by the side of the input
FORWARD = 0.9  # least share of the time that is that of the forward passes
CURVE = 1e-5  # largest difference between the curves
ROUNDS = 5


def rows(options: Options) -> Iterator[Row]:
    """Measure deletion."""
    for side, bound in BOUNDS.items():
        progress(f"deletion, {side} px")
        found = run_json(sys.executable, "bench.metrics", str(side), str(1 if options.quick else ROUNDS))
        if found["difference"] > CURVE:
            raise AssertionError(f"the curves differ by {found['difference']}")
        head: Row = {"run": "deletion, 224 steps", "of": f"ViT-Ti/16, {side} px", "s": f"{statistics.median(found['ours']):.3g}"}
        beside = ratio(found["ours"], found["loop"])
        yield row(head, f"{spread(beside)} x a plain loop", beside[0], bound, f"<= {bound} x", "peer: one input at a time")
        if "quantus" in found:
            beside = ratio(found["ours"], found["quantus"])
            yield row(head, f"{spread(beside)} x Quantus", beside[0], 1, "<= 1 x", "peer: Quantus")
        share = ratio(found["forward"], found["ours"])
        yield row(head, f"{share[0]:.1%} in forward passes", share[0], FORWARD, f">= {FORWARD:.0%}", "limit: the forward passes")


PART = Part(
    "Metrics of maps",
    rows,
    protocol=(
        "Deletion of one gray image in 224 steps, random weights: `visattn.evaluation.deletion` in batches of 32, a loop that runs one "
        f"input at a time, and `PixelFlipping` of Quantus, {ROUNDS} rounds that alternate after one. The curves agree to {CURVE:g}.",
    ),
    headlines=(("Deletion in 224 steps", r"deletion, 224 steps"),),
)
