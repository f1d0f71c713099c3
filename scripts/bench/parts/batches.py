"""Many images in one run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.parts.part import Options, Part, row, unbounded
from bench.parts.processes import progress, run_json
from bench.shared import THREADS
from visattn._support.tables import Row

IMAGES, SHARE = 64, 0.9  # bound, as a share of what the stages allow


def rows(options: Options) -> Iterator[Row]:
    """Measure a run over a folder of photos against its stages."""
    progress("a folder of photos")
    found = run_json(sys.executable, "bench.batches", "16" if options.quick else str(IMAGES))
    about = f"{found['images']} photos, rollout, DINOv2 ViT-S/14 at 224 px"
    for stage, what in (("decode", "1 thread"), ("model", f"{THREADS} threads"), ("draw", "1 thread"), ("write", "1 thread")):
        yield unbounded({"run": about, "what": f"{stage}, {what}"}, f"{found['images'] / found[stage]:.1f} images/s")
    told = f"{found['share']:.2f} x {found['images'] / found['bound']:.1f} images/s"
    yield row(
        {"run": about, "what": "whole run / bound"},
        told,
        found["share"],
        SHARE,
        f">= {SHARE:g} x",
        "limit: no stage waits for another",
    )


PART = Part(
    "Many images in one run",
    rows,
    protocol=(
        "Photos of up to 640 px as JPEG files, 16 in a batch, PNG pictures and a journal, on a local disk; medians of three rounds. The "
        "bound is the time without any waiting: decoding, drawing and writing spread over "
        f"{THREADS} CPUs, and the model on all of them.",
    ),
)
