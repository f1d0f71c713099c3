"""Sliding-window attention as the number of tokens grows."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.parts.part import Options, Part, megabytes, row, unbounded
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

BOUND = 5  # growth of time and of memory for four times the tokens
TOKENS = 1_024, 4_096, 16_384
MASKED = TOKENS[:2]  # with a mask for all pairs of tokens, 16,384 would take 10 GB and more
ROUNDS = 15


def rows(options: Options) -> Iterator[Row]:
    """Measure the module, and the same attention with a dense mask."""
    progress("sliding windows")
    rounds = 5 if options.quick else ROUNDS
    for kind, counts in (("mask", MASKED), ("tiles", TOKENS)):
        found = {n: measured(kind, n, rounds) for n in counts}
        for tokens, figures in found.items():
            head: Row = {
                "run": "visattn" if kind == "tiles" else "a mask of all pairs",
                "tokens": tokens,
                "ms": f"{figures['seconds'] * 1e3:.0f}",
                "MB": megabytes(figures["bytes"]),
            }
            fewer = found.get(tokens // 4)
            if fewer is None:
                yield unbounded(head)
                continue
            for what, name in (("seconds", "time"), ("bytes", "memory")):
                growth = figures[what] / fewer[what]
                text = f"{name} {growth:.2f} x that of {tokens // 4:,} tokens"
                if kind == "tiles":
                    yield row(head, text, growth, BOUND, f"<= {BOUND} x", "promise: linear cost")
                else:
                    yield unbounded(head, text)


def measured(kind: str, tokens: int, rounds: int) -> dict[str, float]:
    """Measure seconds with an allocator that keeps freed memory, and bytes in another process, where it gives freed memory back."""

    def run(allocator: str) -> dict[str, float]:
        found: dict[str, float] = run_json(sys.executable, "bench.windows", kind, str(tokens), str(rounds), allocator=allocator)
        return found

    return run("apart") | {"seconds": run("keeps")["seconds"]}


PART = Part(
    "Sliding windows",
    rows,
    protocol=(
        "A forward pass and a backward pass to the input and all parameters of `SlidingWindowAttention(64, 2, radius=2)`, on a square "
        "grid, each number of tokens in processes of its own, one for time and one for memory. `a mask of all pairs` is the same module "
        f"with `need_weights=True`. The median of {ROUNDS} rounds after one.",
    ),
    headlines=(("Sliding windows, 4 x the tokens", r"visattn \| 16384"),),
)
