"""Helpers for attention over tokens: heads, masks, and attention weights on request.

A mask is boolean and True where a query may attend. A query that may attend nowhere gets zeros, not NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from visattn._support.checks import at_least
from visattn.errors import OptionError, ShapeError
from visattn.nn.shape_checks import is_traced, shape_text


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Check that the number of heads divides the channels.

    Raises:
        OptionError: If it does not, or if either is below 1.
    """
    if at_least("embed_dim", embed_dim) % at_least("num_heads", num_heads):
        raise OptionError(f"num_heads must divide embed_dim, got {num_heads} heads for {embed_dim} channels. Choose a divisor.")


def check_grid(module: object, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> None:
    """Check that `x` has `prefix` tokens and then one token per grid cell.

    Raises:
        ShapeError: If the number of tokens is another.
    """
    if is_traced(x):
        return
    rows, columns = grid
    if prefix + rows * columns != x.shape[1]:
        before = f"{prefix} global tokens and " if prefix else ""
        raise ShapeError(
            f"{type(module).__name__} must be given {before}{rows} x {columns} tokens, got {x.shape[1]}. "
            "Pass the grid of these tokens as (rows, columns)."
        )


def check_mask(mask: Tensor | None, scores: Sequence[int]) -> None:
    """Check that a mask is boolean and broadcasts to the scores.

    Raises:
        OptionError: If it is not boolean.
        ShapeError: If it does not broadcast.
    """
    if mask is None or is_traced(mask):
        return
    if mask.dtype != torch.bool:
        raise OptionError(
            f"mask must be boolean, True where a query may attend, got {mask.dtype}. Invert masks of nn.MultiheadAttention: ~mask."
        )
    fits = all(have in (1, want) for have, want in zip(mask.shape[::-1], scores[::-1], strict=False))
    if mask.ndim > len(scores) or not fits:
        wanted = f"({', '.join(map(str, scores))})"
        raise ShapeError(f"mask must broadcast to {wanted}, got {shape_text(mask)}. Add axes of length 1 to broadcast.")


def split(x: Tensor, num_heads: int) -> Tensor:
    """Split `(B, N, heads * d)` into heads, `(B, heads, N, d)`."""
    return torch.unflatten(x, -1, (num_heads, -1)).transpose(1, 2)


def split_qkv(x: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split `(B, N, 3 * heads * d)` into query, key and value, each `(B, heads, N, d)`."""
    query, key, value = torch.unflatten(x, -1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def join(x: Tensor) -> Tensor:
    """Concatenate heads, `(B, heads, N, d)`, to `(B, N, heads * d)`."""
    return x.transpose(1, 2).flatten(2)


def softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the softmax over the last axis. Fully masked rows and their gradients are 0."""
    if mask is None:
        return scores.softmax(-1)
    least = torch.finfo(scores.dtype).min  # -inf would give 0 / 0 in a fully masked row, also in the backward pass
    return scores.masked_fill(~mask, least).softmax(-1).masked_fill(~mask, 0)


def mix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute `softmax(Q K^T scale + mask) V`, with a fused kernel unless the weights are needed.

    Args:
        query: `(B, heads, Q, d)`.
        key: `(B, heads, K, d)`.
        value: `(B, heads, K, d)`.
        mask: Boolean mask, True where a query may attend, or a float tensor to add to the scores. It broadcasts to `(B, heads, Q, K)`.
        scale: Factor on the scores, `1 / sqrt(d)` by default.
        need_weights: Whether to return the weights too.

    Returns:
        The output `(B, heads, Q, d)`, and the weights `(B, heads, Q, K)` or None.
    """
    if not need_weights:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale), None
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT  # (B, heads, Q, K)
    weights = softmax(scores, mask) if mask is None or mask.dtype == torch.bool else softmax(scores + mask)
    return weights.to(value.dtype) @ value, weights
