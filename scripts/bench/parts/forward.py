"""Time against the plain forward pass."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.parts.part import Options, Part, row, unbounded
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

ROUNDS = {224: 60, 518: 15, 1036: 5, 1778: 1}  # side in pixels: timed rounds
ROLLOUT = {224: 1.2, 518: 1.35, 1036: 1.55, 1778: 1.8}  # bound, relative to the plain forward pass
HEADS = {224: 1.08, 518: 1.05, 1036: 1.05, 1778: 1.05}
BY = {
    "rollout": "limit: the pass, then the weights of each layer times one row",
    "last-layer heads": "limit: the pass, then the weights of one layer",
}


def rows(options: Options) -> Iterator[Row]:
    """Measure plain forward pass, rollout and last-layer heads, at each size."""
    for side, rounds in sizes(options.quick).items():
        progress(f"{side} px, {rounds} rounds")
        seconds = run_json(sys.executable, "bench.timing", str(side), str(rounds), allocator="keeps")
        for name, bounds in (("plain forward", {}), ("rollout", ROLLOUT), ("last-layer heads", HEADS)):
            head: Row = {"px": side, "tokens": (side // 14) ** 2 + 1, "run": name, "ms": f"{seconds[name] * 1e3:.1f}"}
            ratio = seconds[name] / seconds["plain forward"]
            if bounds:
                yield row(head, f"{ratio:.3f} x plain", ratio, bounds[side], f"<= {bounds[side]:g} x", BY[name])
            else:
                yield unbounded(head)


def sizes(quick: bool) -> dict[int, int]:
    """Return the sides in pixels, and the number of rounds for each."""
    return {side: rounds for side, rounds in ROUNDS.items() if not (quick and side == 1778)}


PART = Part(
    "Time",
    rows,
    protocol=(
        "One process for each size and one warm-up round, then the runs in turn; times are medians. `rollout` captures "
        'every layer. `last-layer heads` captures the last, `capture(model, layers="blocks.11.*")`.',
    ),
    headlines=(
        ("capture and rollout, DINOv2 ViT-S/14, 224 px", r"224 \| \d+ \| rollout"),
        ("capture and rollout, 1036 px", r"1036 \| \d+ \| rollout"),
        ("capture and heads of the last layer, 224 px", r"224 \| \d+ \| last-layer heads"),
    ),
)
