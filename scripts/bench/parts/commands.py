"""CPU time of whole commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from bench.parts.part import Options, Part, row, unbounded
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

RATIO = 1.0  # bound, relative to the script by hand
SECONDS = {"list": 0.6, "doctor": 0.6, "refused input": 0.6}  # bounds in seconds
HELP_SECONDS = 0.06  # bound, more than bare Python
ROUNDS = 11  # CPU times of whole processes vary by some percent
SAME_MAP = 1e-4  # bound on the difference of the two maps, relative to the largest value


def rows(options: Options) -> Iterator[Row]:
    """Measure whole commands, and a script that draws the same map by hand."""
    progress("commands")
    found = run_json(sys.executable, "bench.commands", "2" if options.quick else str(ROUNDS))
    python = found["seconds"]["python"]
    for name, seconds in found["seconds"].items():
        kind, _, side = name.rpartition(" ")
        run = {"overlay": f"visattn overlay, {side} px", "by hand": f"script by hand, {side} px"}.get(kind, name)
        head: dict[str, Any] = {"run": run, "CPU s": f"{seconds:.2f}"}
        if name in found["ratios"]:
            ratio, differs = found["ratios"][name], found["differs"][side]
            yield row(head, f"{ratio:.3f} x by hand", ratio, RATIO, f"<= {RATIO:g} x", "peer: a script by hand")
            yield row(
                head | {"run": f"map of {run}"},
                f"differs by {differs:.1e}",
                differs,
                SAME_MAP,
                f"<= {SAME_MAP:g}",
                "peer: a script by hand",
            )
        elif name in SECONDS:
            yield row(
                head, f"{seconds:.2f} s", seconds, SECONDS[name], f"<= {SECONDS[name]:g} s", "promise: an answer without PyTorch"
            )
        elif name == "--help":
            more = seconds - python
            yield row(
                head,
                f"{more * 1e3:.0f} ms more than python",
                more,
                HELP_SECONDS,
                f"<= {HELP_SECONDS * 1e3:g} ms",
                "promise: it feels immediate",
            )
        else:
            yield unbounded(head)


PART = Part(
    "CPU time of whole commands",
    rows,
    protocol=(
        f"CPU time of whole processes; medians of {ROUNDS} in turn after a first one. The script by hand, "
        "[by_hand.py](../scripts/bench/by_hand.py), makes the same map and PNG file by timm, PIL and OpenCV.",
    ),
    headlines=(("the command overlay, against a script by hand, 518 px", r"visattn overlay, 518 px"),),
)
