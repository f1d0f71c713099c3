"""Means that train fast: the slope of `Tensor.mean` is written out over the whole map, that of a sum is one number for all of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mean_over(x: Tensor, *axes: int) -> Tensor:
    """`x.mean(axes, keepdim=True)`; half precision is summed in float32, since the sum of a map overflows there."""
    total = x.sum(axes, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return (total / math.prod([x.shape[axis] for axis in axes])).to(x.dtype)
