"""Attention modules against their peers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.parts.part import Options, Part, megabytes, row, spread, unbounded
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

BOUNDS = {"cbam": 0.6, "se": 1.0}  # bounds of the time, relative to timm
PEAKS = {"cbam": 0.6}  # bounds of the peak memory, relative to timm
ROUNDS = 40, 300  # rounds of a module, and of a module with a bound


def rows(options: Options) -> Iterator[Row]:
    """Measure each module of `visattn.nn.ATTENTION`, equivalent modules of other libraries, and a bare gate."""
    progress("forward and backward of each module")
    rounds = (5, 20) if options.quick else ROUNDS
    found = run_json(sys.executable, "bench.modules", *map(str, rounds), ",".join(BOUNDS), allocator="keeps")
    for name, series in found.items():
        gate = series["seconds"].pop("gate")
        for run, seconds in series["seconds"].items():
            head: Row = {
                "module": name,
                "batch": series["batch"],
                "run": run,
                "parameters": series["parameters"][run],
                "ms": f"{seconds * 1e3:.2f}",
                "time": f"{seconds / gate:.1f} x gate",
            }
            peer = next((other for other in series["seconds"] if other.startswith("timm")), None)
            if run != "visattn" or peer is None:
                yield unbounded(head)
                continue
            measured = f"{spread(series['ratios'][peer])} x timm"
            if name in BOUNDS:
                yield row(head, measured, series["ratios"][peer][0], BOUNDS[name], f"<= {BOUNDS[name]:g} x", "peer: timm")
            else:
                yield unbounded(head, measured)
            if name in PEAKS:
                ours, theirs = (run_json(sys.executable, "bench.peaks", name, other, allocator="apart") for other in (run, peer))
                measured = f"peak memory {megabytes(ours)} MB, {ours / theirs:.2f} x timm"
                yield row(
                    {**head, "ms": None, "time": None},
                    measured,
                    ours / theirs,
                    PEAKS[name],
                    f"<= {PEAKS[name]:g} x",
                    "peer: timm",
                )


PART = Part(
    "Attention modules",
    rows,
    protocol=(
        "A forward pass and a backward pass to the input and all parameters, in float32 and training mode, on maps of 256 x 28 x 28. "
        "Peers have the same layers and widths. A bare `gate` is only the product of the maps with a number for each channel. "
        f"After 5 warm-up rounds there are {ROUNDS[0]} ({ROUNDS[1]} with a bound), every other one backwards.",
    ),
    headlines=(("CBAM, forward and backward pass", r"cbam \| \d+ \| visattn"),),
)
