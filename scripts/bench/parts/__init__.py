"""Parts of the benchmark: a file for each, with its bounds, its rows and how they are measured. `python -m bench.NAME` does the work."""

from __future__ import annotations

from bench.parts import (
    batches,
    calls,
    cams,
    captions,
    capture,
    commands,
    contributions,
    counts,
    films,
    forward,
    memory,
    methods,
    metrics,
    modules,
    overlay,
    spaces,
    training,
    viewer,
    weights,
    windows,
)
from bench.parts.part import Part

PARTS: dict[str, Part] = {
    "time": forward.PART,
    "memory": memory.PART,
    "capture": capture.PART,
    "methods": methods.PART,
    "weights": weights.PART,
    "overlay": overlay.PART,
    "modules": modules.PART,
    "windows": windows.PART,
    "cams": cams.PART,
    "training": training.PART,
    "contributions": contributions.PART,
    "metrics": metrics.PART,
    "captions": captions.PART,
    "counts": counts.PART,
    "calls": calls.PART,
    "commands": commands.PART,
    "viewer": viewer.PART,
    "spaces": spaces.PART,
    "batches": batches.PART,
    "films": films.PART,
}
