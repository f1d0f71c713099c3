"""Sliding-window attention."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn.errors import OptionError
from visattn.nn.shape_checks import check_tokens
from visattn.nn.tokens.multihead import check_grid, check_heads, join, mix, split_qkv

_TILE = 8  # cells along the side of a tile, at least


class SlidingWindowAttention(nn.Module):
    """Sliding-window attention on a grid: each token attends to its neighborhood; global tokens attend to all tokens and all to them.

    `softmax(Q K^T / sqrt(d)) V` over a window and the global tokens, then heads are concatenated and projected. The window has the tokens
    whose row and column offsets are multiples of the dilation, at most `radius` times. At the borders the window is clipped. Global tokens
    have their own projections for queries, keys and values.

    Queries are taken in square tiles, and each tile only meets the keys in reach, so time and memory grow linearly with the number of
    tokens. On a grid with no more keys than a tile would meet, and with `need_weights=True`, all pairs are computed.

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
        reach = self.radius * max(self.dilations)
        side = max(reach, _TILE)
        if need_weights or (side + 2 * reach) ** 2 >= grid[0] * grid[1]:  # a tile would meet all keys
            parts = [mix(query[:, :, first:], key, value, self._mask(grid, x.device), need_weights=need_weights)]
        else:
            parts = [(self._in_tiles(query, key, value, grid, side, reach), None)]
        if self.qkv_global is not None:
            query, key, value = split_qkv(self.qkv_global(x), self.num_heads)
            parts.insert(0, mix(query[:, :, :first], key, value, need_weights=need_weights))
        out: Tensor = self.proj(join(torch.cat([part for part, _ in parts], 2)))  # (B, G + N, C)
        weights = [part for _, part in parts if part is not None]
        return (out, torch.cat(weights, 2)) if weights else out

    def _in_tiles(self, query: Tensor, key: Tensor, value: Tensor, grid: tuple[int, int], side: int, reach: int) -> Tensor:
        """Attend from the grid tokens of `(B, heads, G + N, d)` to their windows and the global tokens: `(B, heads, N, d)`.

        A tile of `side` x `side` queries reads the keys that lie up to `reach` beyond it, and the mask hides the rest.
        """
        first = self.global_tokens
        tiles = [-(-size // side) for size in grid]
        queries = _blocks(query[:, :, first:], grid, tiles, side, 0)  # (B * tiles, heads, side ** 2, d)
        keys, values = (
            torch.cat([_for_each_tile(x[:, :, :first], tiles), _blocks(x[:, :, first:], grid, tiles, side, reach)], 2)
            for x in (key, value)
        )
        mask = self._mask_of_tiles(grid, tiles, side, reach, query.device)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask.repeat(len(query), 1, 1, 1))
        return _joined(out, grid, tiles, side)

    def _mask_of_tiles(self, grid: tuple[int, int], tiles: Sequence[int], side: int, reach: int, device: torch.device) -> Tensor:
        """Build the mask of the tiles, True where a query may attend: `(tiles, heads or 1, side ** 2, G + keys)`.

        Queries beyond the grid, whose results are dropped, may attend to keys beyond it: a row without keys would have no finite gradient.
        """
        inside = torch.ones(1, 1, grid[0] * grid[1], 1, device=device)
        own = _blocks(inside, grid, tiles, side, 0).bool()  # (tiles, 1, side ** 2, 1)
        others = _blocks(inside, grid, tiles, side, reach).bool().mT  # (tiles, 1, 1, keys)
        of_queries = torch.arange(side, device=device)
        of_keys = torch.arange(-reach, side + reach, device=device)
        near = self._near(torch.cartesian_prod(of_queries, of_queries), torch.cartesian_prod(of_keys, of_keys))
        return F.pad(near & (others | ~own), (self.global_tokens, 0), value=True)

    def _mask(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        """Build the mask of the grid tokens, True where they may attend: `(1, heads or 1, N, G + N)`."""
        places = torch.cartesian_prod(*(torch.arange(size, device=device) for size in grid))  # (N, 2)
        return F.pad(self._near(places, places), (self.global_tokens, 0), value=True)[None]

    def _near(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Check which keys lie in the windows of queries, both given by row and column: `(heads or 1, Q, K)`."""
        offsets = (queries[:, None] - keys).abs()  # (Q, K, 2)
        step = torch.tensor(self.dilations, device=queries.device).view(-1, 1, 1, 1)
        return ((offsets <= self.radius * step) & (offsets % step == 0)).all(-1)


def _blocks(x: Tensor, grid: tuple[int, int], tiles: Sequence[int], side: int, reach: int) -> Tensor:
    """Cut `(B, heads, N, d)` on a grid into the cells of each tile and those around it, `(B * tiles, heads, (side + 2 * reach) ** 2, d)`.

    Cells beyond the grid are zeros.
    """
    below, right = (count * side - size + reach for count, size in zip(tiles, grid, strict=True))
    x = F.pad(torch.unflatten(x, 2, grid), (0, 0, reach, right, reach, below))
    width = side + 2 * reach
    blocks = x.unfold(2, width, side).unfold(3, width, side)  # (B, heads, tile rows, tile columns, d, width, width)
    return blocks.permute(0, 2, 3, 1, 5, 6, 4).flatten(4, 5).flatten(0, 2)


def _for_each_tile(x: Tensor, tiles: Sequence[int]) -> Tensor:
    """Repeat `(B, heads, G, d)` for each tile: `(B * tiles, heads, G, d)`."""
    return x[:, None].expand(-1, tiles[0] * tiles[1], -1, -1, -1).flatten(0, 1)


def _joined(x: Tensor, grid: tuple[int, int], tiles: Sequence[int], side: int) -> Tensor:
    """Return tiles of queries, `(B * tiles, heads, side ** 2, d)`, to the grid that they were cut from: `(B, heads, N, d)`."""
    rows, columns = grid
    x = torch.unflatten(torch.unflatten(x, 0, (-1, *tiles)), 4, (side, side)).permute(0, 3, 1, 4, 2, 5, 6)
    return x.flatten(4, 5).flatten(2, 3)[:, :, :rows, :columns].flatten(2, 3)
