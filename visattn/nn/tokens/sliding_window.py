"""Sliding-window attention."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn.errors import OptionError
from visattn.nn.shape_checks import check_tokens
from visattn.nn.tokens.multihead import check_grid, check_heads, join, mix, split_qkv


class SlidingWindowAttention(nn.Module):
    """Sliding-window attention on a grid: each token attends to its neighborhood; global tokens attend to all tokens and all to them.

    `softmax(Q K^T / sqrt(d)) V` over a window and the global tokens, then heads are concatenated and projected. The window has the tokens
    whose row and column offsets are multiples of the dilation, at most `radius` times. At the borders the window is clipped. Global tokens
    have their own projections for queries, keys and values. The mask is dense: **time and memory grow with the square of the number of
    tokens**, whatever the radius.

    Args:
        embed_dim: Width of a token, C.
        num_heads: Number of heads, a divisor of C.
        radius: Number of tokens that the window extends to each side; 2 gives a 5 x 5 window.
        dilation: Spacing of the tokens in the window: one number for all heads, or one per head.
        global_tokens: Number of global tokens, which precede the grid tokens.
        qkv_bias: Whether the query, key and value projections have a bias.

    Shape:
        `(B, G + N, C)`, the G global tokens first, and a grid `(rows, columns)` of N tokens in row-major order, to `(B, G + N, C)`. With
        `need_weights=True` also the weights, `(B, heads, G + N, G + N)`, 0 outside the window.

    Raises:
        OptionError: If `num_heads` does not divide `embed_dim`, a number is too small, or `dilation` has neither one number nor one per
            head.
        ShapeError: In the forward pass, if the input is not `(B, G + N, C)` or the grid does not have N cells.

    Reference:
        Beltagy et al., "Longformer: The Long-Document Transformer", 2020, arXiv:2004.05150, on a grid as in Zhang et al., "Multi-Scale
        Vision Longformer", ICCV 2021, arXiv:2103.15358. Differs: the paper gives a window size `w`, which is a radius of `w / 2` in one
        dimension.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 8,
        *,
        radius: int,
        dilation: int | Sequence[int] = 1,
        global_tokens: int = 0,
        qkv_bias: bool = True,
    ) -> None:
        """Build with PyTorch's default initialization; the global projection starts as a copy of the local one."""
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.radius, self.global_tokens = at_least("radius", radius, 0), at_least("global_tokens", global_tokens, 0)
        self.dilations = [dilation] if isinstance(dilation, int) else list(dilation)
        for one in self.dilations:
            at_least("dilation", one)
        if len(self.dilations) not in {1, num_heads}:
            raise OptionError(f"dilation must be one number or one per head ({num_heads}), got {len(self.dilations)} numbers.")
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.qkv_global = copy.deepcopy(self.qkv) if global_tokens else None
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, grid: tuple[int, int], need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from grid tokens to their windows and the global tokens, and from global tokens to all."""
        check_tokens(self, x, self.embed_dim)
        check_grid(self, x, grid, self.global_tokens)
        first = self.global_tokens
        query, key, value = split_qkv(self.qkv(x), self.num_heads)
        parts = [mix(query[:, :, first:], key, value, self._mask(grid, x.device), need_weights=need_weights)]
        if self.qkv_global is not None:
            query, key, value = split_qkv(self.qkv_global(x), self.num_heads)
            parts.insert(0, mix(query[:, :, :first], key, value, need_weights=need_weights))
        out: Tensor = self.proj(join(torch.cat([part for part, _ in parts], 2)))  # (B, G + N, C)
        weights = [part for _, part in parts if part is not None]
        return (out, torch.cat(weights, 2)) if weights else out

    def _mask(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        """Build the mask of the grid tokens, True where they may attend: `(1, heads or 1, N, G + N)`."""
        places = torch.cartesian_prod(*(torch.arange(size, device=device) for size in grid))  # (N, 2)
        offsets = (places[:, None] - places).abs()  # (N, N, 2)
        step = torch.tensor(self.dilations, device=device).view(-1, 1, 1, 1)
        near = ((offsets <= self.radius * step) & (offsets % step == 0)).all(-1)  # (heads or 1, N, N)
        return nn.functional.pad(near, (self.global_tokens, 0), value=True)[None]
