"""What attention over tokens shares: heads, masks, and weights that are written out only where they are asked for.

A mask is boolean and True where a query may attend. A query that may attend nowhere gets zeros, not NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.errors import OptionError, ShapeError
from visattn.nn.shapes import at_least, is_traced, shape_text


def check_heads(channels: int, heads: int) -> None:
    """Refuse a number of heads that does not divide the channels.

    Raises:
        OptionError: If it does not, or one of them is below 1.
    """
    if at_least("channels", channels) % at_least("heads", heads):
        raise OptionError(f"heads must divide the channels, got {heads} heads for {channels} channels. Choose a divisor.")


def check_grid(module: object, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> None:
    """Refuse a grid that does not count the tokens of `x` behind the first `prefix` ones.

    Raises:
        ShapeError: If it does not.
    """
    if is_traced(x):
        return
    rows, columns = grid
    if prefix + rows * columns != x.shape[1]:
        before = f"{prefix} global tokens and " if prefix else ""
        raise ShapeError(
            f"{type(module).__name__} must be given {before}{rows} x {columns} tokens, got {x.shape[1]}. "
            "Pass the grid that these tokens come from, as (rows, columns)."
        )


def check_mask(mask: Tensor | None, scores: Sequence[int]) -> None:
    """Refuse a mask that is not boolean or does not broadcast to the scores.

    Raises:
        OptionError: If it is not boolean.
        ShapeError: If it does not broadcast.
    """
    if mask is None or is_traced(mask):
        return
    if mask.dtype != torch.bool:
        raise OptionError(
            f"mask must be boolean, True where a query may attend, got {mask.dtype}. Use ~mask of nn.MultiheadAttention's masks."
        )
    fits = all(have in (1, want) for have, want in zip(mask.shape[::-1], scores[::-1], strict=False))
    if mask.ndim > len(scores) or not fits:
        wanted = f"({', '.join(map(str, scores))})"
        raise ShapeError(f"mask must broadcast to {wanted}, got {shape_text(mask)}. Add axes of length 1 where it is shared.")


def split(x: Tensor, heads: int) -> Tensor:
    """`(B, N, heads d)` as `(B, heads, N, d)`."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


def split_qkv(x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """`(B, N, 3 heads d)` as query, key and value, each `(B, heads, N, d)`."""
    query, key, value = torch.unflatten(x, -1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def join(x: Tensor) -> Tensor:
    """`(B, heads, N, d)` as `(B, N, heads d)`."""
    return x.transpose(1, 2).flatten(2)


def softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Weights over the last axis; where nothing is kept they are 0, and so are their gradients."""
    if mask is None:
        return scores.softmax(-1)
    least = torch.finfo(scores.dtype).min  # with -inf a row that is masked whole is 0 / 0, backwards too
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
    """`softmax(Q K^T scale + mask) V`, fused unless the weights are asked for.

    Args:
        query: `(B, heads, Q, d)`.
        key: `(B, heads, K, d)`.
        value: `(B, heads, K, d)`.
        mask: Boolean, True where a query may attend, or what is added to the scores; it broadcasts to `(B, heads, Q, K)`.
        scale: `1 / sqrt(d)` by default.
        need_weights: Whether to write the weights out.

    Returns:
        `(B, heads, Q, d)`, and the weights, `(B, heads, Q, K)`, or None.
    """
    if not need_weights:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale), None
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    weights = softmax(scores, mask) if mask is None or mask.dtype == torch.bool else softmax(scores + mask)
    return weights.to(value.dtype) @ value, weights
