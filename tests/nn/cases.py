"""Every module with an input for it: what `test_every_module.py` runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from visattn import nn as ours

Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]


def maps(channels: int = 8, rows: int = 5, columns: int = 7, batch: int = 2) -> Callable[[], tuple[Tensor, ...]]:
    """A batch of feature maps, the same each time."""
    return lambda: (torch.randn(batch, channels, rows, columns, generator=torch.Generator().manual_seed(0)),)


GATES: dict[str, Case] = {
    "SE": (lambda: ours.SqueezeExcite(8), maps()),
    "CBAM": (lambda: ours.CBAM(8), maps()),
}
