"""Time of calls from Python as JSON: `python -m bench.calls SIDE ROUNDS`, with DINOv2 ViT-S/14 already loaded, and of loading it."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor

import visattn
from bench.measuring import load, ratio, series
from bench.shared import THREADS
from visattn import data


def feature(output: Tensor) -> Tensor:
    """Return the first feature of the class token as a score."""
    return output[:, 0]


def main(side: int, rounds: int) -> dict[str, Any]:
    """Return median seconds, and ratios of each call to what it is compared with."""
    torch.set_num_threads(THREADS)
    model, weights = load(), data.offline_weights()
    photo = visattn.load_image("photo:coffee").resize((side, side))
    prepared = visattn.prepare(photo, model, img_size=side)

    def forward() -> None:
        with torch.inference_mode():
            model(prepared.pixels)

    def backward() -> None:
        pixels = prepared.pixels.clone().requires_grad_()
        torch.autograd.grad(feature(model(pixels)).sum(), pixels)

    def explain(method: str, **options: Any) -> Callable[[], object]:  # noqa: ANN401
        return lambda: visattn.explain(model, photo, method=method, img_size=side, **options)

    def theirs() -> object:
        return timm.create_model(data.OFFLINE_MODEL, pretrained=False, checkpoint_path=str(weights))

    for parameter in model.parameters():
        parameter.requires_grad_(False)  # as explain does: a backward pass to the pixels alone
    runs = {
        "forward": forward,
        "forward + backward": backward,
        "attention": explain("attention"),
        "relevance": explain("relevance", target=feature),
    }
    seconds = series(runs, rounds, warmup=2, back=True)
    seconds |= series(
        {"timm": theirs, "load_model": lambda: visattn.load_model(data.OFFLINE_MODEL, weights=weights)}, rounds, 1, back=True
    )
    bases = {"attention": "forward", "relevance": "forward + backward", "load_model": "timm"}
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "ratios": {name: ratio(seconds[name], seconds[base]) for name, base in bases.items()},
    }


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
