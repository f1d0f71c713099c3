"""Sliding-window attention."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from visattn.errors import OptionError
from visattn.nn.shapes import at_least, check_tokens
from visattn.nn.tokens.heads import check_grid, check_heads, join, mix, split_qkv


class SlidingWindowAttention(nn.Module):
    """Sliding-window attention on a grid: each token attends to those around it, and a few global tokens to all and all to them.

    `softmax(Q K^T / sqrt(d)) V` over the tokens whose offsets down and right are multiples of the dilation, at most `radius` of
    them, and over the global tokens; heads joined and projected. At the borders the window is clipped. Global tokens ask with
    queries, keys and values of their own. The mask is dense: **time and memory grow with the square of the tokens**, whatever the
    radius.

    Args:
        channels: C.
        heads: A divisor of C.
        radius: How many tokens a window reaches to each side; 2 is a window of 5 x 5.
        dilation: How far these lie apart, of all heads or of each.
        global_tokens: How many tokens before the grid are global.
        qkv_bias: Whether queries, keys and values have biases.

    Shape:
        `(B, G + N, C)`, the G global tokens first, and a grid `(rows, columns)` of N tokens, row by row, to `(B, G + N, C)`. With
        `need_weights=True` also the weights, `(B, heads, G + N, G + N)`, 0 outside the window.

    Raises:
        OptionError: If heads do not divide the channels, or a number is too small or not one for each head.
        ShapeError: In the forward, if the input is not `(B, G + N, C)` or the grid does not count N tokens.

    Reference:
        Beltagy et al., "Longformer: The Long-Document Transformer", 2020, arXiv:2004.05150, on a grid as in Zhang et al.,
        "Multi-Scale Vision Longformer", ICCV 2021, arXiv:2103.15358. Differs: the paper's window of `w` is a radius of `w / 2` in one
        dimension.
    """

    def __init__(
        self,
        channels: int,
        heads: int = 8,
        *,
        radius: int,
        dilation: int | Sequence[int] = 1,
        global_tokens: int = 0,
        qkv_bias: bool = True,
    ) -> None:
        """Build with PyTorch's initial values of a linear layer; the global projection starts as a copy of the local one."""
        super().__init__()
        check_heads(channels, heads)
        self.channels, self.heads = channels, heads
        self.radius, self.global_tokens = at_least("radius", radius, 0), at_least("global_tokens", global_tokens, 0)
        self.dilations = [dilation] if isinstance(dilation, int) else list(dilation)
        for one in self.dilations:
            at_least("dilation", one)
        if len(self.dilations) not in {1, heads}:
            raise OptionError(f"dilation must be one number or one for each of {heads} heads, got {len(self.dilations)} numbers.")
        self.qkv = nn.Linear(channels, 3 * channels, bias=qkv_bias)
        self.qkv_global = copy.deepcopy(self.qkv) if global_tokens else None
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, grid: tuple[int, int], need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Let each token attend to its window and to the global tokens, and those to all."""
        check_tokens(self, x, self.channels)
        check_grid(self, x, grid, self.global_tokens)
        first = self.global_tokens
        query, key, value = split_qkv(self.qkv(x), self.heads)
        parts = [mix(query[:, :, first:], key, value, self._mask(grid, x.device), need_weights=need_weights)]
        if self.qkv_global is not None:
            query, key, value = split_qkv(self.qkv_global(x), self.heads)
            parts.insert(0, mix(query[:, :, :first], key, value, need_weights=need_weights))
        out: Tensor = self.proj(join(torch.cat([part for part, _ in parts], 2)))
        weights = [part for _, part in parts if part is not None]
        return (out, torch.cat(weights, 2)) if weights else out

    def _mask(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        """Where tokens of the grid may attend: `(1, heads or 1, N, G + N)`."""
        places = torch.cartesian_prod(*(torch.arange(size, device=device) for size in grid))  # (N, 2)
        offsets = (places[:, None] - places).abs()
        step = torch.tensor(self.dilations, device=device).view(-1, 1, 1, 1)
        near = ((offsets <= self.radius * step) & (offsets % step == 0)).all(-1)  # (heads or 1, N, N)
        return nn.functional.pad(near, (self.global_tokens, 0), value=True)[None]
