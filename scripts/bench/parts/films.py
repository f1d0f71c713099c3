"""Films."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.parts.part import Options, Part, row, unbounded
from bench.parts.processes import NotMeasured, progress, run_json
from visattn._support.tables import Row

FRAMES, LEVELS = 300, 6.0  # bound of the mean difference from frames that were encoded twice


def rows(options: Options) -> Iterator[Row]:
    """Measure films against the bare forward passes of their frames, and read them with OpenCV."""
    progress("films")
    count = 24 if options.quick else FRAMES
    for codec, found in run_json(sys.executable, "bench.films", str(count)).items():
        about = f"{count} frames, 320 x 240, {codec}, rollout, view beside"
        told = f"{found['whole'] / found['bare']:.2f} x {found['bare']:.1f} s"
        yield unbounded({"film": about, "what": "whole / forward passes alone"}, told)
        if (found["read"], found["rate"]) != (count, 30):
            raise NotMeasured(f"OpenCV reads {found['read']} frames at {found['rate']} a second, of {count} at 30")
        told = f"{found['read']} frames, {found['rate']:g} a second, {found['levels']:.1f} levels"
        head: Row = {"film": about, "what": "read by OpenCV, mean difference from the frames"}
        yield row(head, told, found["levels"], LEVELS, f"<= {LEVELS:g} levels", "limit: the frames are encoded twice")


PART = Part(
    "Films",
    rows,
    protocol=(
        "A camera that moves over a photo, explained 16 frames at a time and encoded again, in one process. The forward passes alone take "
        "frames that are ready.",
    ),
)
