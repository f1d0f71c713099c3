"""Median seconds of each run at one size, as JSON: `python -m bench.timing SIDE ROUNDS`; one warm-up round is not counted."""

from __future__ import annotations

import json
import sys
from functools import partial

from bench.measuring import heads, load, medians, pixels, plain, rollout


def main(side: int, rounds: int) -> dict[str, float]:
    """Return median seconds by the name of the run."""
    model = load()
    image = pixels(model, side)
    runs = {"plain forward": plain, "rollout": rollout, "last-layer heads": heads}
    return medians({name: partial(run, model, image) for name, run in runs.items()}, rounds, warmup=1)


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
