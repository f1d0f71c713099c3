"""Common parts of the benchmark: the model, the pixels, the three basic runs, and the timing."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

import visattn
from bench.shared import THREADS
from visattn import data
from visattn.core import methods

LAST = "blocks.11.*"


def load() -> nn.Module:
    """Load DINOv2 ViT-S/14 with its published weights, and set PyTorch to `THREADS` threads."""
    torch.set_num_threads(THREADS)
    return visattn.load_model(data.OFFLINE_MODEL, weights=data.offline_weights())


def pixels(model: nn.Module, side: int) -> Tensor:
    """Preprocess a real photo, squashed to a square."""
    square = visattn.load_image(data.photo_path("coffee")).resize((side, side))
    return visattn.prepare(square, model, resize="fit", img_size=side).pixels


def plain(model: nn.Module, image: Tensor) -> object:
    """Run only the forward pass."""
    with torch.inference_mode():
        return model(image)


def rollout(model: nn.Module, image: Tensor) -> visattn.Recording:
    """Run the forward pass under capture, then rollout through all layers."""
    with torch.inference_mode():
        with visattn.capture(model) as recording:
            model(image)
        methods.rollout(recording)
    return recording


def heads(model: nn.Module, image: Tensor) -> visattn.Recording:
    """Run the forward pass under capture of the last layer, then compute a map of each of its heads."""
    with torch.inference_mode():
        with visattn.capture(model, layers=LAST) as recording:
            model(image)
        methods.attention(recording)
    return recording


def medians(runs: Mapping[str, Callable[[], object]], rounds: int, warmup: int) -> dict[str, float]:
    """Return median seconds of each run. Runs alternate (A B C A B C ...), so that a slow phase of the machine affects all of them."""
    return {name: statistics.median(values) for name, values in series(runs, rounds, warmup).items()}


def series(runs: Mapping[str, Callable[[], object]], rounds: int, warmup: int, *, back: bool = False) -> dict[str, list[float]]:
    """Return seconds of each run in each round; with `back`, every other round runs backward (A B C C B A ...)."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warmup + rounds):
        order = list(runs.items())
        for name, run in reversed(order) if back and turn % 2 else order:
            start = time.perf_counter()
            run()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the ratios of all rounds, and its 95 % confidence interval."""
    ratios = sorted(one / other for one, other in zip(seconds, base, strict=True))
    reach = 0.98 * math.sqrt(len(ratios))
    low, high = math.floor(len(ratios) / 2 - reach), math.ceil(len(ratios) / 2 + reach)
    return statistics.median(ratios), ratios[max(low, 0)], ratios[min(high, len(ratios) - 1)]
