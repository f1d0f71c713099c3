"""What attention over the places of feature maps shares: maps as tokens, weights by either path, sampling between pixels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.errors import ShapeError
from visattn.nn.shapes import is_traced


def tokens(x: Tensor, heads: int = 1) -> Tensor:
    """`(B, heads * d, H, W)` as `(B, heads, H * W, d)`, places in raster order."""
    return torch.unflatten(x, 1, (heads, -1)).flatten(3).transpose(2, 3)


def grid(x: Tensor, maps: Tensor) -> Tensor:
    """`(B, heads, H * W, d)` as `(B, heads * d, H, W)`: `tokens` undone, with the size and the memory format of `maps`."""
    return laid_out_as(torch.unflatten(x.transpose(1, 2).flatten(2).transpose(1, 2), 2, maps.shape[2:]), maps)


def laid_out_as(x: Tensor, maps: Tensor) -> Tensor:
    """`x` with its channels last in memory if those of `maps` are, else in PyTorch's order."""
    if is_traced(maps):
        return x
    last = maps.is_contiguous(memory_format=torch.channels_last) and not maps.is_contiguous()
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, bias: Tensor | None = None, need_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention, and its weights if they are asked for: `softmax(scale query key^T + bias) value`.

    Without the weights it is PyTorch's fused kernel, which `visattn.capture` sees. With them, scores are in float32 at least, also
    under autocast: unscaled scores exceed what float16 holds.

    Args:
        query: `(..., Q, d)`.
        key: `(..., K, d)`.
        value: `(..., K, e)`.
        scale: What scores are multiplied by.
        bias: What is added to the scores, `(..., Q, K)`.
        need_weights: Whether to write the weights out.

    Returns:
        `(..., Q, e)`, and the weights `(..., Q, K)` or None.
    """
    if not need_weights:
        # as they are, the kernel that writes out all scores would run
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
    """The largest of each 2 x 2 places; an odd last row or column is left out, as in the published code.

    Raises:
        ShapeError: If a side has a single place.
    """
    if not is_traced(x) and min(x.shape[-2:]) < 2:
        raise ShapeError(
            f"{type(module).__name__} must be given 2 x 2 places or more to pool its keys, got {x.shape[-2]} x {x.shape[-1]}. "
            "Build it without pooling."
        )
    return F.max_pool2d(x, 2)


def sample(x: Tensor, positions: Tensor) -> Tensor:
    """`x` between its pixels, and 0 outside, at positions `(B, h, w, 2)` as (x, y), -1 and 1 being the outer edges.

    In float32 at least: half precision would move the positions by whole pixels.
    """
    with exact(x):
        source = wide(x)
        return laid_out_as(F.grid_sample(source, positions.to(source.dtype), align_corners=False).to(x.dtype), x)


def exact(x: Tensor) -> AbstractContextManager[object]:
    """Autocast off on the device of `x`; under `fx` tracing, where nobody knows the device, as it is."""
    return nullcontext() if is_traced(x) else torch.autocast(x.device.type, enabled=False)


def wide(x: Tensor) -> Tensor:
    """`x` in float32 at least; under `fx` tracing, where nobody knows the type, as it is."""
    return x if is_traced(x) else x.to(torch.promote_types(x.dtype, torch.float32))
