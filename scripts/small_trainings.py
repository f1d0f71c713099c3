"""Training of small networks on data sets that fit in memory, for the scripts that compare such networks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor

from visattn.data import LabeledDataset

BATCH = 128


@dataclass(frozen=True)
class Split:
    """Tensors of a whole split: gray pixels `(N, 1, H, W)`, and labels `(N,)`."""

    pixels: Tensor
    labels: Tensor


def whole(pictures: LabeledDataset) -> Split:
    """Load all images as tensors, with pixels in [0, 1]."""
    pixels = torch.stack([pil_to_tensor(pictures[i][0].convert("L")) for i in range(len(pictures))])
    return Split(pixels.float() / 255, torch.from_numpy(pictures.labels))


def standardized(train: Split, test: Split) -> tuple[Split, Split, tuple[float, float]]:
    """Return both splits with the mean and deviation of the training pixels taken out, and these two numbers."""
    mean, std = float(train.pixels.mean()), float(train.pixels.std())
    one, other = (Split((part.pixels - mean) / std, part.labels) for part in (train, test))
    return one, other, (mean, std)


def fit(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    count: int,
    *,
    epochs: int,
    seed: int,
    rate: float,
    slower: tuple[str, float] = ("", 1.0),
    warmup: int = 0,
    clip: float | None = None,
    after: Callable[[float], None] | None = None,
) -> None:
    """Train with Adam and a cosine schedule; the order of the images depends only on the seed.

    Args:
        model: The network, which is left in evaluation mode.
        loss: Loss of the images with these indices.
        count: Number of images.
        epochs: Number of epochs.
        seed: Seed of the order.
        rate: Learning rate.
        warmup: Steps in which the rate rises to its full value.
        slower: Beginning of the names of parameters that learn at a share of this rate, and the share.
        clip: Largest norm of a gradient; none by default.
        after: Is called with the mean loss after each epoch.
    """
    order = torch.Generator().manual_seed(seed)
    steps = max(1, count // BATCH)
    apart, rest = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        (apart if slower[0] and name.startswith(slower[0]) else rest).append(parameter)
    groups: list[dict[str, Any]] = [{"params": rest}, *([{"params": apart, "lr": slower[1] * rate}] if apart else [])]
    optimizer = torch.optim.Adam(groups, rate)
    falls = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps - warmup)
    rises = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / max(warmup, 1), total_iters=warmup)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rises, falls], [warmup]) if warmup else falls
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for chosen in torch.split(torch.randperm(count, generator=order)[: steps * BATCH], BATCH):
            value = loss(chosen)
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            total += float(value.detach())
        print(f"epoch {epoch + 1}: loss {total / steps:.3f}", file=sys.stderr, flush=True)
        if after is not None:
            after(total / steps)
    model.eval()


@torch.no_grad()
def named_right(model: nn.Module, data: Split) -> NDArray[np.bool_]:
    """Return for each image whether it was classified correctly."""
    outputs = [model(pixels) for pixels in torch.split(data.pixels, 1000)]
    scores = torch.cat([getattr(output, "logits", output) for output in outputs])
    found: NDArray[np.bool_] = (scores.argmax(1) == data.labels).numpy()
    return found
