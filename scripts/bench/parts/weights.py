"""All attention weights of a ViT against other libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.parts.part import Options, Part, megabytes, row, spread, unbounded
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

LIBRARIES = "timm", "transformers"
ROUNDS = {224: 40, 512: 8}  # side in pixels: rounds
ROWS, MATRICES = "visattn, the class token's rows", "visattn, whole matrices"
RATIO, MATRICES_RATIO = 1.0, 1.3  # bounds, relative to the peer
KEEPS = "promise: the model keeps its fused attention, so its output stays the same to the bit"
DIFFERENCE = 1e-4  # bound, relative to the largest weight


def rows(options: Options) -> Iterator[Row]:
    """Measure the weights of all layers of ViT-S/16, by a capture and by the model's library."""
    for library in LIBRARIES:
        for side, rounds in ROUNDS.items():
            progress(f"attention weights, {library}, {side} px")
            found = run_json(
                sys.executable, "bench.weights", library, str(side), "4" if options.quick else str(rounds), allocator="keeps"
            )
            peer = found["peer"]
            for run, seconds in found["seconds"].items():
                peak = run_json(sys.executable, "bench.weights", library, str(side), "peak", run, allocator="apart")
                head: Row = {
                    "model of": library,
                    "px": side,
                    "run": run,
                    "ms": f"{seconds * 1e3:.1f}",
                    "growth MB": megabytes(peak),
                    "time": None if run == "plain forward" else f"{spread(found['plain'][run])} x plain",
                }
                measured, ratio = f"{spread(found['ratios'][run])} x {peer}", found["ratios"][run][0]
                if run == ROWS:
                    yield row(head, measured, ratio, RATIO, f"<= {RATIO:g} x", f"peer: {peer}, which places no token")
                elif run == MATRICES:
                    yield row(head, measured, ratio, MATRICES_RATIO, f"<= {MATRICES_RATIO:g} x", KEEPS)
                else:
                    yield unbounded(head)
            differs = found["differs"]
            head = {"model of": library, "px": side, "run": "whole matrices", "ms": None, "growth MB": None, "time": None}
            yield row(head, f"differ by {differs:.1e}", differs, DIFFERENCE, f"<= {DIFFERENCE:g}", f"peer: {peer}")


PART = Part(
    "Attention weights",
    rows,
    protocol=(
        "ViT-S/16 of timm and of transformers with random weights, batch 1, one thread, all 12 layers. The peers switch fused attention "
        "off, and keep the weights that the model computes then. A capture leaves it on, and computes weights from queries and keys "
        "afterward: one row of each matrix, or whole matrices.",
    ),
    headlines=(
        ("the class token's weights in all layers, 224 px", r"timm \| 224 \| visattn, the class token's rows"),
        ("whole matrices of weights, 224 px", r"timm \| 224 \| visattn, whole matrices"),
    ),
)
