"""The viewer's page."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.parts.part import Options, Part, row
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

BOUNDS = {  # side in pixels: bounds in MB, seconds until the page can be used, ms of a hover over all heads, ms of the 95th of 100 frames
    "224": {"megabytes": 5, "ready": 2, "hover": 50, "frame": 33},
    "518": {"megabytes": 40, "ready": 2, "hover": 120, "frame": 33},
}
BY = {
    "megabytes": "promise: it can be mailed",
    "ready": "promise: nobody waits for a page",
    "hover": "promise: it follows the hand",
    "frame": "promise: 30 frames a second",
}
UNITS = {"megabytes": "MB", "ready": "s until it can be used", "hover": "ms for all heads", "frame": "ms, 95 % of frames"}
GROWTH = 20.0  # bound in MB, over 3,000 hovers
HOVERS = 1000


def rows(options: Options) -> Iterator[Row]:
    """Measure the viewer's page of DINOv2 in Chromium."""
    progress("the viewer's page")
    found = run_json(sys.executable, "bench.viewer", "100" if options.quick else str(HOVERS))
    for side, bounds in BOUNDS.items():
        for what, bound in bounds.items():
            value = found[side][what]
            yield row({"px": side, "what": what}, f"{value:.3g} {UNITS[what]}", value, bound, f"<= {bound:g}", BY[what])
        growth = found[side]["growth"]
        yield row(
            {"px": side, "what": "growth over hovers"},
            f"{growth:.1f} MB",
            growth,
            GROWTH,
            f"<= {GROWTH:g} MB",
            "promise: it can stay open",
        )


PART = Part(
    "The viewer's page",
    rows,
    protocol=(
        "The page of `study.save_html` in Chromium without a window or a GPU, 1280 x 900 pixels. A hover sets the query and draws the "
        f"image and all heads; the median of {HOVERS}. Frames are those of a pointer that moves over the photo. Growth is that of the "
        f"JavaScript heap over {3 * HOVERS:,} hovers.",
    ),
    headlines=(("the viewer's page of 518 px: a hover, until all heads are drawn", r"518 \| hover"),),
)
