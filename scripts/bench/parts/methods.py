"""Methods against the forward, whole matrices and peers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from bench.parts.part import Options, Part, megabytes, row, unbounded
from bench.parts.processes import peers_python, progress, run_json
from visattn._support.tables import Row

ROUNDS = {224: 5, 518: 3, 1036: 1, 1778: 1}
METHODS = {  # run: what its ratio refers to, the largest side that is run, bound in bytes at 1778 px
    "forward": (None, 1036, None),
    "forward + backward": (None, 1036, None),
    "rollout": ("forward", 1778, 4e9),
    "rollout of norms": ("forward", 1778, 4e9),
    "entropy and distance": ("forward", 1778, 4e9),
    "relevance": ("forward + backward", 1778, 10e9),
    "legrad": ("forward + backward", 1778, 10e9),
    "dense rollout": ("rollout", 1036, None),
    "torchxai-explain rollout": ("rollout", 1036, None),
    "fast-vit-rollout": ("rollout", 1036, None),
    "dense relevance": ("relevance", 518, None),
    "torchxai-explain attribution": ("relevance", 518, None),
}
FITS = "promise: 16,130 tokens without a token x token matrix for each head"
DENSE_RATIO = 3.0  # bound, relative to rollout at 1036 px


def rows(options: Options) -> Iterator[Row]:
    """Measure each method with its capture, compared with bare passes, whole matrices and other libraries."""
    for side, rounds in ROUNDS.items():
        if options.quick and side == 1778:
            continue
        found: dict[str, dict[str, Any]] = {}
        for name, (base, largest, allowed) in METHODS.items():
            if side > largest:
                continue
            progress(f"{side} px, {name}")
            theirs = name.startswith(("torchxai", "fast-vit"))
            python = str(peers_python()) if theirs else sys.executable
            found[name] = run_json(python, "bench.methods", name, str(side), str(rounds))
            seconds, growth = found[name]["seconds"], found[name]["growth"]
            ratio = seconds / found[base]["seconds"] if base in found else None
            head: Row = {
                "px": side,
                "run": name,
                "s": f"{seconds:.3g}",
                "growth MB": megabytes(growth),
                "time": None if ratio is None else f"{ratio:.2f} x {base}",
                "differs": difference(found[name]["map"], found.get(base or "", {}).get("map")),
            }
            if side == 1036 and name == "dense rollout":
                yield row(
                    head, f"{ratio:.1f} x rollout", ratio or 0, DENSE_RATIO, f">= {DENSE_RATIO:g} x", "peer: whole matrices"
                )
            elif side == 1778 and allowed is not None:
                yield row(head, f"{megabytes(growth)} MB", growth, allowed, f"<= {megabytes(allowed)} MB", FITS)
            else:
                yield unbounded(head)


def difference(one: list[float] | None, other: list[float] | None) -> str | None:
    """Return the largest difference of two maps relative to the largest value, if both are known."""
    if one is None or other is None:
        return None
    return f"{max(abs(a - b) for a, b in zip(one, other, strict=True)) / max(other):.1e}"


PART = Part(
    "Methods",
    rows,
    protocol=(
        "A fresh process for each method, capture included; one warm-up round at 224 and 518 px; medians. Growth is the first round's "
        "peak minus the loaded model. Methods with a target explain feature 0 of the class token. Whole matrices and peers run as far as "
        "24 GB of memory allow: rollout at 1778 px would take 25 GB, relevance at 1036 px 26 GB. `differs` is the largest difference from "
        "our map over its largest value. The attribution of torchxai-explain is another method, the nearest one in that package.",
    ),
    headlines=(("rollout from whole matrices, 1036 px", r"1036 \| dense rollout"),),
)
