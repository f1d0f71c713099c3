"""Marks of weights, which tell whether these were written since, also where PyTorch does not count it, as through `.data`."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

LARGE = 1 << 15  # numbers of a weight above which its projection is several times faster than a comparison


def mark_of(weight: Tensor) -> Tensor:
    """Return a copy of a small weight, and a projection of each row of a large one to a random direction.

    A write that changes no row's projection is as likely as none at all.
    """
    weight = weight.detach()
    if weight.numel() <= LARGE or weight.ndim < 2 or not weight.is_floating_point():
        return weight.clone()
    is_channels_last = weight.ndim == 4 and not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)
    rows = (weight.permute(0, 2, 3, 1) if is_channels_last else weight).flatten(1)
    return torch.mv(rows, _direction(rows.shape[1], rows.dtype, rows.device))


@lru_cache(64)
def _direction(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(device, dtype)
