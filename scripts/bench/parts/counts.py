"""Counts that no machine changes: functions that are called, operations, and values that are read."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

from bench.parts.part import Options, Part, row, unbounded
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

EMPTY = "empty function mode"
CALLS = {"capture": 1.75, "explain, attention": 3.25, "explain, relevance": 4.9}  # bounds, relative to an empty function mode
MOST_CALLS = {"explain, Grad-CAM": 12_000}  # bounds
BY = "limit: an interception of each call, and its comparison"
WAITS = "promise: a GPU is waited for after the pass, not inside"
READS = {"capture": 1, "explain, attention": 3, "explain, relevance": 4, "explain, Grad-CAM": 4}  # bounds


def rows(_: Options) -> Iterator[Row]:
    """Count in the third call of each run."""
    progress("counts")
    found = run_json(sys.executable, "bench.counts")
    empty = found[EMPTY]["calls"]
    for name, counts in found.items():
        calls, names = counts["calls"], Counter(counts["reads"])
        head: Row = {"run": name, "operations": f"{counts['operations']:,}", "of": "calls"}
        if name in CALLS:
            ratio = calls / empty
            yield row(head, f"{calls:,} ({ratio:.2f} x empty)", ratio, CALLS[name], f"<= {CALLS[name]:g} x", BY)
        elif name in MOST_CALLS:
            yield row(head, f"{calls:,}", calls, MOST_CALLS[name], f"<= {MOST_CALLS[name]:,}", BY)
        else:
            yield unbounded(head, f"{calls:,}")
        if name in READS:
            count, by_name = names.total(), ", ".join(f"{number} {function}" for function, number in names.items())
            yield row({**head, "of": "reads"}, f"{count} ({by_name})", count, READS[name], f"<= {READS[name]}", WAITS)


PART = Part(
    "Counts that no machine changes",
    rows,
    protocol=(
        "timm's ViT-S at 224 px and ResNet-50 with random weights, the third call of each run. Calls are the events `call` and `c_call` of "
        "`sys.setprofile`. Reads are values of tensors that Python asks for: on a GPU each waits for all that was started.",
    ),
)
