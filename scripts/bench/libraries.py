"""Time of captures of models of transformers at their real width, as JSON: `python -m bench.libraries SECONDS [NAME ...]`."""

from __future__ import annotations

import json
import sys
import time
from itertools import cycle

import torch
import transformers

import visattn
from bench.measuring import medians
from visattn.capturing import forget

SIZES = {
    "RTDetrForObjectDetection": (640, 640),
    "MobileViTForImageClassification": (256, 256),
    "DetrForObjectDetection": (480, 640),
}
_THREADS = 1
_ROUNDS = 8


def main(seconds: int, names: list[str]) -> dict[str, dict[str, float]]:
    """Return for each model the seconds of a plain forward pass, and the ratios of a first and of a later capture.

    A model runs as many rounds as take about `seconds`, and 8 at least: the shorter its forward pass, the more a ratio varies.
    """
    torch.set_num_threads(_THREADS)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    found: dict[str, dict[str, float]] = {}
    for name, size in SIZES.items():
        if names and name not in names:
            continue
        kind = getattr(transformers, name)
        torch.manual_seed(0)
        model = kind(kind.config_class()).eval()
        images = cycle(torch.randn(4, 1, 3, *size))  # a detector picks other tokens for each

        def plain(model: torch.nn.Module = model, images: cycle[torch.Tensor] = images) -> None:
            with torch.inference_mode():
                model(next(images))

        def capture(model: torch.nn.Module = model, images: cycle[torch.Tensor] = images) -> None:
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
        found[name] = {
            "seconds": later["plain"],
            "first": early["first"] / early["plain"],
            "capture": later["capture"] / later["plain"],
        }
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2:])))
