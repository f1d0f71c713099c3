"""Time and peak memory of sliding-window attention, as JSON: `python -m bench.windows {tiles|mask} TOKENS ROUNDS`.

`tiles` is `SlidingWindowAttention`, `mask` the same attention with a mask for all pairs of tokens. The memory is the growth of the process
in forward and backward passes, after a first pass of few tokens. The allocator must give freed memory back.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
from typing import Any

import torch

from bench.measuring import series
from bench.shared import THREADS
from visattn.nn import SlidingWindowAttention

WIDTH, HEADS, RADIUS = 64, 2, 2
FEWEST = 64  # tokens of the first pass, a square


def main(kind: str, tokens: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of a forward and a backward pass, and its bytes."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    module = SlidingWindowAttention(WIDTH, HEADS, radius=RADIUS)
    train(module, kind, FEWEST)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = series({"run": lambda: train(module, kind, tokens)}, rounds, warmup=1)["run"]
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"seconds": statistics.median(seconds), "bytes": used}


def train(module: SlidingWindowAttention, kind: str, tokens: int) -> None:
    """Run a forward pass and a backward pass to the input and all parameters, on a square grid of tokens."""
    x = torch.randn(1, tokens, WIDTH, requires_grad=True)
    side = math.isqrt(tokens)
    out: Any = module(x, (side, side), need_weights=kind == "mask")
    torch.autograd.grad(out[0] if kind == "mask" else out, [x, *module.parameters()], torch.ones(1, tokens, WIDTH))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
