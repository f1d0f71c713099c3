"""Means with a fast backward pass: the gradient of `Tensor.mean` fills a whole map, that of a sum is one expanded number."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mean_over(x: Tensor, *axes: int) -> Tensor:
    """Compute `x.mean(axes, keepdim=True)`. Half precision is summed in float32, because the sum over a map can overflow."""
    total = x.sum(axes, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return (total / math.prod([x.shape[axis] for axis in axes])).to(x.dtype)
