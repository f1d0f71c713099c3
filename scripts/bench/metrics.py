"""Cost of deletion beside a plain loop and beside Quantus, as JSON: `python -m bench.metrics SIDE ROUNDS`.

All compute the same curve of one gray image in 224 steps (Quantus ranks the numbers of all channels, so it would need three times the
steps for colors). The loop runs one input at a time. `forward` is what the forward passes of ours take.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import numpy as np
import timm
import torch
from quantus_apart import quantus
from torch import Tensor, nn

from bench.measuring import series
from bench.shared import THREADS
from visattn.evaluation import deletion

MODEL = "vit_tiny_patch16_224"
STEPS, TARGET = 224, 3


def compared(side: int, rounds: int) -> dict[str, Any]:
    """Return seconds of each, and the largest difference of their curves."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = timm.create_model(MODEL, in_chans=1, img_size=side).eval().requires_grad_(requires_grad=False)
    pixels, values = torch.randn(1, 1, side, side), torch.randn(side, side).numpy()
    forward, curves = list[float](), dict[str, list[float]]()

    def score(inputs: Tensor) -> Tensor:
        start = time.perf_counter()
        scores: Tensor = model(inputs).softmax(-1)[:, TARGET]
        forward[-1] += time.perf_counter() - start
        return scores

    def ours() -> None:
        forward.append(0.0)
        curves["ours"] = deletion(score, pixels, values, steps=STEPS).scores[1:].tolist()

    def loop() -> None:
        curves["loop"] = by_loop(model, pixels, values)

    runs = {"ours": ours, "loop": loop}

    def theirs() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = metric(
                model=model, x_batch=pixels.numpy(), y_batch=np.array([TARGET]), a_batch=values[None, None], device="cpu"
            )
        curves["quantus"] = list(found[0])

    if side * side % STEPS == 0:  # which Quantus needs
        metric = of_quantus(side)
        runs["quantus"] = theirs
    seconds = series(runs, rounds, warmup=1)
    difference = max(float(np.abs(np.subtract(curves["ours"], curves[name])).max()) for name in runs)
    return {**seconds, "forward": forward[1:], "difference": difference}


@torch.no_grad()
def by_loop(model: nn.Module, pixels: Tensor, values: Any) -> list[float]:  # noqa: ANN401 - an array
    """Return the same scores, one input after the other."""
    order = torch.from_numpy(np.argsort(-values, axis=None).copy())
    changed, scores, done = pixels.clone(), list[float](), 0
    for step in range(1, STEPS + 1):
        count = round(step * len(order) / STEPS)
        changed.view(1, -1)[:, order[done:count]] = 0
        done = count
        scores.append(float(model(changed).softmax(-1)[0, TARGET]))
    return scores


def of_quantus(side: int) -> Any:  # noqa: ANN401 - of Quantus
    """Return its metric with the same steps."""
    return quantus().PixelFlipping(
        features_in_step=side * side // STEPS,
        perturb_baseline=0.0,
        normalise=False,
        disable_warnings=True,
        return_aggregate=False,
    )


if __name__ == "__main__":
    print(json.dumps(compared(int(sys.argv[1]), int(sys.argv[2]))))
