"""All heads in one space."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.parts.part import Options, Part, row, unbounded
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

IMAGES = 200
BOUNDS = {"minutes": ("min", 10.0), "gigabytes": ("GB", 6.0), "megabytes": ("MB", 60.0)}
FRAME = 33.0  # milliseconds


def rows(options: Options) -> Iterator[Row]:
    """Measure queries and keys of all heads of DINOv2 over many images, and their page in Chromium."""
    progress("all heads in one space")
    found = run_json(sys.executable, "bench.spaces", "12" if options.quick else str(IMAGES))
    about = f"{found['images']} images of {found['tokens']} tokens, {found['heads']} heads"
    for what, (unit, bound) in BOUNDS.items():
        yield row(
            {"run": about, "what": what},
            f"{found[what]:.3g} {unit}",
            found[what],
            bound,
            f"<= {bound:g} {unit}",
            "promise: a laptop can do it in a break",
        )
    frame = {"run": f"zooming all heads, {found['points']:,} points", "what": "95th percentile of a frame"}
    yield row(frame, f"{found['frame']:.3g} ms", found["frame"], FRAME, f"<= {FRAME:g} ms", "promise: 30 frames a second")
    for method in ("tsne", "umap"):
        yield unbounded(
            {"run": f"{method} of one head, {found['laid out']:,} points", "what": "layout"}, f"{found[method]:.1f} s"
        )


PART = Part(
    "All heads in one space",
    rows,
    protocol=(
        "Photos with random crops, and generated scenes. Minutes are those of `gather` and `save_html` with PCA; gigabytes are the peak of "
        "the process, PyTorch included.",
    ),
)
