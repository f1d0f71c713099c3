"""Time of captures of models of transformers at their real width, as JSON: `python -m bench.libraries SECONDS [NAME ...]`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
import transformers

import visattn
from bench.measuring import medians
from visattn.core.capturing import forget

SIZES = {
    "RTDetrForObjectDetection": (640, 640),
    "MobileViTForImageClassification": (256, 256),
    "DetrForObjectDetection": (480, 640),
}
BATCHES = 2, 1  # the first has a bound, as for the other models
_THREADS = 1
_ROUNDS = 4


def main(seconds: int, names: list[str]) -> list[dict[str, Any]]:
    """Return for each model and batch size the seconds of a plain forward pass, and the ratios of a first and of a later capture.

    A series runs as many rounds as take about `seconds`, and 4 at least: the shorter the forward pass, the more a ratio varies.
    """
    torch.set_num_threads(_THREADS)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    found: list[dict[str, Any]] = []
    for name, size in SIZES.items():
        if names and name not in names:
            continue
        kind = getattr(transformers, name)
        torch.manual_seed(0)
        model = kind(kind.config_class()).eval()
        for batch in BATCHES:
            images = cycle(torch.randn(4, batch, 3, *size))  # a detector picks other tokens for each
            found.append({"model": name, "batch": batch, **measured(model, images, seconds)})
            print(found[-1], file=sys.stderr, flush=True)
    return found


def measured(model: torch.nn.Module, images: Iterator[torch.Tensor], seconds: int) -> dict[str, float]:
    """Measure one model with one batch size."""

    def plain() -> None:
        with torch.inference_mode():
            model(next(images))

    def capture() -> None:
        with torch.inference_mode(), visattn.capture(model, features="none"):
            model(next(images))

    def first() -> None:
        forget()
        capture()

    plain()
    start = time.perf_counter()
    plain()
    rounds = max(round(seconds / (2 * (time.perf_counter() - start))), _ROUNDS)
    early = medians({"plain": plain, "first": first}, rounds // 2, warmup=1)
    later = medians({"plain": plain, "capture": capture}, rounds, warmup=2)
    return {
        "seconds": later["plain"],
        "first": early["first"] / early["plain"],
        "later": later["capture"] / later["plain"],
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2:])))
