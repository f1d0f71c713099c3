"""Cost of contributions and of patching, as JSON.

`python -m bench.contributions cost MODEL ROUNDS`: seconds of plain forward passes and of the method, in rounds that alternate.
`python -m bench.contributions memory SIDE`: growth of the process in one call, after one of a small image.
`python -m bench.contributions patching ROUNDS`: seconds of patching every head, and of a plain script of hooks with the same batches.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import visattn
from bench.measuring import load, pixels, plain, series
from bench.shared import THREADS
from visattn import data
from visattn.core.pipeline.inputs import Prepared, prepare
from visattn.core.pipeline.replacing import AT_ONCE
from visattn.evaluation import patched_heads

PATCHED = "vit_small_patch16_224"
SMALL = 56  # side of the first image
PHOTOS = "coffee", "astronaut"
Parts = list[tuple[int, int]]  # block and head


def built(name: str) -> nn.Module:
    """Build a model of timm with random weights."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name).eval().requires_grad_(requires_grad=False)
    return model


def explained(model: nn.Module, image: Tensor) -> None:
    """Compute the direct contributions to the first output."""
    visattn.explain(model, pixels=image, method="contributions", target=lambda output: output[:, 0])


def cost(name: str, rounds: int) -> dict[str, list[float]]:
    """Return seconds of plain forward passes and of contributions."""
    model = built(name)
    image = prepare(visattn.load_image(data.photo_path(PHOTOS[0])), model).pixels
    return series({"plain": partial(plain, model, image), "contributions": partial(explained, model, image)}, rounds, warmup=1)


def memory(side: int) -> int:
    """Return the growth in bytes of one call for a square image, with DINOv2 ViT-S/14."""
    model = load()

    def run(side: int) -> None:
        explained(model, pixels(model, side))

    run(SMALL)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(side)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def patching(rounds: int) -> dict[str, list[float]]:
    """Return seconds of patching all heads of a model, by us and by hooks."""
    model = built(PATCHED)
    photos = [visattn.load_image(data.photo_path(name)) for name in PHOTOS]
    found: dict[str, list[float]] = {}

    def ours() -> None:
        result = patched_heads(model, *photos, target=0)
        found["ours"] = [result.score + row["change"] for row in result.rows()]

    def hooks() -> None:
        found["hooks"] = by_hooks(model, [prepare(photo, model) for photo in photos])

    seconds = series({"ours": ours, "hooks": hooks}, rounds, warmup=1, back=True)
    if not torch.allclose(torch.tensor(found["ours"]), torch.tensor(found["hooks"]), rtol=0, atol=1e-6):
        raise AssertionError("the scores differ")
    return seconds


@torch.no_grad()
def by_hooks(model: Any, both: list[Prepared]) -> list[float]:  # noqa: ANN401 - of timm
    """Return the score with each head of another photo, by hooks on the inputs of the output projections."""
    kept, scores = list[Tensor](), list[float]()
    heads, width = model.blocks[0].attn.num_heads, model.blocks[0].attn.head_dim
    handles = [block.attn.proj.register_forward_pre_hook(lambda _, args: kept.append(args[0])) for block in model.blocks]
    model(both[1].pixels)
    for handle in handles:
        handle.remove()
    model(both[0].pixels)
    parts = [(block, head) for block in range(len(kept)) for head in range(heads)]
    for start in range(0, len(parts), AT_ONCE):
        some = parts[start : start + AT_ONCE]
        handles = list[RemovableHandle]()
        for block in sorted({block for block, _ in some}):

            def change(_module: nn.Module, args: tuple[Tensor], block: int = block, some: Parts = some) -> tuple[Tensor]:
                own = args[0].clone()
                for image, (of, head) in enumerate(some):
                    if of == block:
                        own[image, :, head * width : (head + 1) * width] = kept[block][0, :, head * width : (head + 1) * width]
                return (own,)

            handles.append(model.blocks[block].attn.proj.register_forward_pre_hook(change))
        scores += model(both[0].pixels.expand(len(some), -1, -1, -1))[:, 0].tolist()
        for handle in handles:
            handle.remove()
    return scores


RUNS: dict[str, Callable[..., Any]] = {
    "cost": lambda name, rounds: cost(name, int(rounds)),
    "memory": lambda side: memory(int(side)),
    "patching": lambda rounds: patching(int(rounds)),
}


if __name__ == "__main__":
    print(json.dumps(RUNS[sys.argv[1]](*sys.argv[2:])))
