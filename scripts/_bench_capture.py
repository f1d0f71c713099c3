"""Median seconds of a plain forward and of captures of a timm model with random weights, as JSON: `_bench_capture.py NAME ROUNDS`."""

from __future__ import annotations

import json
import sys

import torch
from _bench_common import THREADS, medians

import visattn
from visattn._capture import forget


def main(name: str, rounds: int) -> dict[str, float]:
    """Seconds by the name of the run; in a first capture the tokens are followed, later ones remember it."""
    torch.set_num_threads(THREADS)
    model = visattn.load_model(name, weights="none")
    image = torch.randn(1, 3, 224, 224)

    def plain() -> None:
        with torch.inference_mode():
            model(image)

    def capture() -> None:
        with torch.inference_mode(), visattn.capture(model, features="none"):
            model(image)

    def first() -> None:
        forget()
        capture()

    return medians({"plain forward": plain, "first capture": first, "capture": capture}, rounds, warmup=2)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
