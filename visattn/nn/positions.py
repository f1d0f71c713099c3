"""Helpers for attention over the positions of feature maps: conversion to tokens, attention with or without weights, sampling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.errors import ShapeError
from visattn.nn.shape_checks import is_traced


def tokens(x: Tensor, heads: int = 1) -> Tensor:
    """Reshape `(B, heads * d, H, W)` to `(B, heads, H * W, d)`, positions in raster order."""
    return torch.unflatten(x, 1, (heads, -1)).flatten(3).transpose(2, 3)


def grid(x: Tensor, maps: Tensor) -> Tensor:
    """Reshape `(B, heads, H * W, d)` to `(B, heads * d, H, W)`, with the size and memory format of `maps`: the inverse of `tokens`."""
    return laid_out_as(torch.unflatten(x.transpose(1, 2).flatten(2).transpose(1, 2), 2, maps.shape[2:]), maps)


def laid_out_as(x: Tensor, maps: Tensor) -> Tensor:
    """Return `x` in channels-last memory format if `maps` has it, else contiguous."""
    if is_traced(maps):
        return x
    last = maps.is_contiguous(memory_format=torch.channels_last) and not maps.is_contiguous()
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, bias: Tensor | None = None, need_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute `softmax(scale query key^T + bias) value`, and the attention weights on request.

    Without the weights, PyTorch's fused kernel runs, which `visattn.capture` can record. With the weights, scores are computed in at least
    float32, also under autocast: unscaled scores overflow float16.

    Args:
        query: `(..., Q, d)`.
        key: `(..., K, d)`.
        value: `(..., K, e)`.
        scale: Factor on the scores.
        bias: Tensor to add to the scores, `(..., Q, K)`.
        need_weights: Whether to return the weights too.

    Returns:
        The output `(..., Q, e)`, and the weights `(..., Q, K)` or None.
    """
    if not need_weights:
        # for strided inputs PyTorch falls back to the kernel that materializes all scores
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale), None
    with exact(query):
        query, key, values = wide(query), wide(key), wide(value)
        scores = query @ key.transpose(-2, -1) * scale
        if bias is not None:
            scores = scores + bias
        weights = scores.softmax(-1)
        return (weights @ values).to(value.dtype), weights


def halved(module: object, x: Tensor) -> Tensor:
    """Apply 2 x 2 max pooling. It drops an odd last row or column, as the published code does.

    Raises:
        ShapeError: If a side has length 1.
    """
    if not is_traced(x) and min(x.shape[-2:]) < 2:
        raise ShapeError(
            f"{type(module).__name__} must be given 2 x 2 positions or more to pool its keys, got {x.shape[-2]} x {x.shape[-1]}. "
            "Build it without pooling."
        )
    return F.max_pool2d(x, 2)


def sample(x: Tensor, positions: Tensor) -> Tensor:
    """Sample `x` bilinearly at `positions`, `(B, h, w, 2)` as (x, y), where -1 and 1 are the outer edges; outside `x` is 0.

    Computes in at least float32: half precision would move the positions by whole pixels.
    """
    with exact(x):
        source = wide(x)
        return laid_out_as(F.grid_sample(source, positions.to(source.dtype), align_corners=False).to(x.dtype), x)


def exact(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that disables autocast on the device of `x`; a no-op under `fx` tracing, where the device is unknown."""
    return nullcontext() if is_traced(x) else torch.autocast(x.device.type, enabled=False)


def wide(x: Tensor) -> Tensor:
    """Convert `x` to at least float32; a no-op under `fx` tracing, where the dtype is unknown."""
    return x if is_traced(x) else x.to(torch.promote_types(x.dtype, torch.float32))
