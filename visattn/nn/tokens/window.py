"""Shifted-window attention (Swin)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn.errors import OptionError
from visattn.nn.shape_checks import check_tokens
from visattn.nn.tokens.multihead import check_grid, check_heads, join, mix, split_qkv


class WindowAttention(nn.Module):
    """Window attention: tokens attend within non-overlapping windows, with a learned relative position bias.

    `softmax(Q K^T / sqrt(d) + b) V` within each window, then heads are concatenated and projected. With a shift, the grid is first rolled
    up and left (a cyclic shift), and tokens that share a window only because of the roll are masked. An axis that fits in one window is not
    shifted. Parameter names and shapes are those of timm's `WindowAttention`. Torchvision's `ShiftedWindowAttention` has the same ones,
    plus an index buffer that `load_checkpoint` leaves out.

    Args:
        embed_dim: Width of a token, C.
        num_heads: Number of heads, a divisor of C.
        window_size: Rows and columns of a window, or one number for both.
        shift_size: Rows and columns by which windows are shifted, or one number for both; less than the window. The paper shifts by half a
            window in every second block.
        qkv_bias: Whether the query, key and value projections have a bias.

    Shape:
        `(B, N, C)` and a grid `(rows, columns)` of N tokens in row-major order, to `(B, N, C)`. A grid that is not a multiple of the window
        is padded at the bottom and right; padding is masked. With `need_weights=True` also the weights between all tokens of the grid,
        `(B, heads, N, N)`, 0 outside the window.

    Raises:
        OptionError: If `num_heads` does not divide `embed_dim`, or the shift is not smaller than the window.
        ShapeError: In the forward pass, if the input is not `(B, N, C)` or the grid does not have N cells.

    Reference:
        Liu et al., "Swin Transformer", ICCV 2021, arXiv:2103.14030. Differs: masked pairs get weight 0, while the authors' code adds -100
        to their scores; torchvision attends to padding.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 8,
        *,
        window_size: int | tuple[int, int] = 7,
        shift_size: int | tuple[int, int] = 0,
        qkv_bias: bool = True,
    ) -> None:
        """Build with PyTorch's default initialization and a small random bias table."""
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.window_size, self.shift_size = _pair("window_size", window_size, 1), _pair("shift_size", shift_size, 0)
        if any(by >= side for by, side in zip(self.shift_size, self.window_size, strict=True)):
            raise OptionError(
                f"shift_size must be smaller than window_size {self.window_size}, got {self.shift_size}. Half of it is usual."
            )
        rows, columns = self.window_size
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.relative_position_bias_table = nn.Parameter(torch.empty((2 * rows - 1) * (2 * columns - 1), num_heads))
        self.proj = nn.Linear(embed_dim, embed_dim)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        row, column = (part.flatten() for part in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
        down, right = (part[:, None] - part for part in (row, column))
        offsets = (down + rows - 1) * (2 * columns - 1) + right + columns - 1
        self.register_buffer("offsets", offsets, persistent=False)  # (M, M), indices into the bias table; M tokens per window
        self.offsets: Tensor

    def forward(self, x: Tensor, grid: tuple[int, int], need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each token to its window."""
        check_tokens(self, x, self.embed_dim)
        check_grid(self, x, grid)
        windows = self._cut(torch.unflatten(x, 1, grid), grid)  # (B, rows of windows, columns of windows, M, C)
        query, key, value = split_qkv(self.qkv(windows.flatten(0, 2)), self.num_heads)  # (B windows, heads, M, d)
        numbers = torch.arange(1, grid[0] * grid[1] + 1, device=x.device).view(1, *grid, 1)  # 0 is padding
        numbers = self._cut(numbers, grid).flatten(0, 3).view(-1, len(self.offsets))  # (windows, M)
        bias = self.relative_position_bias_table[self.offsets].permute(2, 0, 1)[None]  # (1, heads, M, M)
        if any(self._shifted(grid)) or any(size % side for size, side in zip(grid, self.window_size, strict=True)):
            bias = bias.masked_fill(self._apart(numbers, grid)[:, None], -torch.inf).repeat(x.shape[0], 1, 1, 1)
        out, weights = mix(query, key, value, bias, need_weights=need_weights)  # bias: (1 or B windows, heads, M, M)
        out = self._paste(self.proj(join(out)).view_as(windows), grid).flatten(1, 2)  # (B, N, C)
        return out if weights is None else (out, _spread(weights, numbers, x.shape[1]))

    def _shifted(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the shift for this grid: 0 along an axis that fits in one window."""
        rows, columns = (
            0 if size <= side else by for size, side, by in zip(grid, self.window_size, self.shift_size, strict=True)
        )
        return rows, columns

    def _cut(self, maps: Tensor, grid: tuple[int, int]) -> Tensor:
        """Pad and roll `(B, rows, columns, C)` and partition it into windows of M tokens."""
        (rows, columns), (down, right) = self.window_size, self._shifted(grid)
        maps = F.pad(maps, (0, 0, 0, -grid[1] % columns, 0, -grid[0] % rows)).roll((-down, -right), (1, 2))
        across = torch.unflatten(maps, 2, (-1, columns))
        return torch.unflatten(across, 1, (-1, rows)).transpose(2, 3).flatten(3, 4)

    def _paste(self, windows: Tensor, grid: tuple[int, int]) -> Tensor:
        """Undo `_cut`: merge windows, roll back and crop the padding."""
        maps = torch.unflatten(windows, 3, self.window_size).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return maps.roll(self._shifted(grid), (1, 2))[:, : grid[0], : grid[1]]

    def _apart(self, numbers: Tensor, grid: tuple[int, int]) -> Tensor:
        """Build the mask of pairs in a window that are not adjacent in the grid, True where masked: `(windows, M, M)`."""
        down, right = self._shifted(grid)
        row, column = (numbers - 1) // grid[1], (numbers - 1) % grid[1]
        part = torch.where(numbers == 0, 4, 2 * (row < down) + (column < right))  # rolling moved the first rows to the end
        return part[:, :, None] != part[:, None]


def _spread(weights: Tensor, numbers: Tensor, tokens: int) -> Tensor:
    """Scatter `(B windows, heads, M, M)` to `(B, heads, tokens, tokens)` by token numbers, which start at 1; 0 is padding."""
    weights = torch.unflatten(weights, 0, (-1, numbers.shape[0])).transpose(1, 2)
    spread = weights.new_zeros(*weights.shape[:2], tokens + 1, tokens + 1)
    spread[:, :, numbers[:, :, None], numbers[:, None]] = weights
    return spread[:, :, 1:, 1:]


def _pair(what: str, value: int | tuple[int, int], low: int) -> tuple[int, int]:
    rows, columns = value if isinstance(value, tuple) else (value, value)
    return at_least(what, rows, low), at_least(what, columns, low)
