"""Shifted-window attention (Swin)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn.errors import OptionError
from visattn.nn.shapes import at_least, check_tokens
from visattn.nn.tokens.heads import check_grid, check_heads, join, mix, split_qkv


class WindowAttention(nn.Module):
    """Window attention: tokens attend within windows side by side, with a learned bias for each offset between two of them.

    `softmax(Q K^T / sqrt(d) + b) V` within each window, heads joined and projected. With a shift the grid is rolled up and to the
    left first and tokens that meet only because of it do not attend to each other; along an axis that one window covers there is
    nothing to shift. Names and shapes of its parameters are those of timm's `WindowAttention`; torchvision's
    `ShiftedWindowAttention` has the same and keeps a list of offsets beside them, which `load_checkpoint` leaves out.

    Args:
        channels: C.
        heads: A divisor of C.
        window: Rows and columns of a window, or one number for both.
        shift: By how many rows and columns windows are shifted, less than the window; the paper's is half of it, in every second
            block.
        qkv_bias: Whether queries, keys and values have biases.

    Shape:
        `(B, N, C)` and a grid `(rows, columns)` of N tokens, row by row, to `(B, N, C)`. A grid that is no multiple of the window is
        padded at the bottom and the right; nobody attends to padding. With `need_weights=True` also the weights between all tokens
        of the grid, `(B, heads, N, N)`, 0 outside the window.

    Raises:
        OptionError: If heads do not divide the channels, or the shift is not smaller than the window.
        ShapeError: In the forward, if the input is not `(B, N, C)` or the grid does not count N tokens.

    Reference:
        Liu et al., "Swin Transformer", ICCV 2021, arXiv:2103.14030. Differs: pairs that are masked get no weight at all, where the
        authors' code adds -100 to their score; torchvision attends to padding.
    """

    def __init__(
        self,
        channels: int,
        heads: int = 8,
        *,
        window: int | tuple[int, int] = 7,
        shift: int | tuple[int, int] = 0,
        qkv_bias: bool = True,
    ) -> None:
        """Build with PyTorch's initial values of a linear layer and a small random table of biases."""
        super().__init__()
        check_heads(channels, heads)
        self.channels, self.heads = channels, heads
        self.window, self.shift = _pair("window", window, 1), _pair("shift", shift, 0)
        if any(by >= side for by, side in zip(self.shift, self.window, strict=True)):
            raise OptionError(f"shift must be smaller than the window {self.window}, got {self.shift}. Half of it is usual.")
        rows, columns = self.window
        self.qkv = nn.Linear(channels, 3 * channels, bias=qkv_bias)
        self.relative_position_bias_table = nn.Parameter(torch.empty((2 * rows - 1) * (2 * columns - 1), heads))
        self.proj = nn.Linear(channels, channels)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        row, column = (part.flatten() for part in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
        down, right = (part[:, None] - part for part in (row, column))
        offsets = (down + rows - 1) * (2 * columns - 1) + right + columns - 1
        self.register_buffer("offsets", offsets, persistent=False)  # (M, M) rows of the table, M tokens in a window
        self.offsets: Tensor

    def forward(self, x: Tensor, grid: tuple[int, int], need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Let each token attend within its window."""
        check_tokens(self, x, self.channels)
        check_grid(self, x, grid)
        windows = self._cut(torch.unflatten(x, 1, grid), grid)  # (B, rows of windows, columns of windows, M, C)
        query, key, value = split_qkv(self.qkv(windows.flatten(0, 2)), self.heads)
        numbers = torch.arange(1, grid[0] * grid[1] + 1, device=x.device).view(1, *grid, 1)  # 0 is padding
        numbers = self._cut(numbers, grid).flatten(0, 3).view(-1, len(self.offsets))  # (windows, M)
        bias = self.relative_position_bias_table[self.offsets].permute(2, 0, 1)[None]
        if any(self._shifted(grid)) or any(size % side for size, side in zip(grid, self.window, strict=True)):
            bias = bias.masked_fill(self._apart(numbers, grid)[:, None], -torch.inf).repeat(x.shape[0], 1, 1, 1)
        out, weights = mix(query, key, value, bias, need_weights=need_weights)  # bias: (1 or B windows, heads, M, M)
        out = self._paste(self.proj(join(out)).view_as(windows), grid).flatten(1, 2)
        return out if weights is None else (out, _spread(weights, numbers, x.shape[1]))

    def _shifted(self, grid: tuple[int, int]) -> tuple[int, int]:
        """By how much this grid is rolled."""
        rows, columns = (0 if size <= side else by for size, side, by in zip(grid, self.window, self.shift, strict=True))
        return rows, columns

    def _cut(self, maps: Tensor, grid: tuple[int, int]) -> Tensor:
        """`(B, rows, columns, C)` padded, rolled and cut into windows of M tokens."""
        (rows, columns), (down, right) = self.window, self._shifted(grid)
        maps = F.pad(maps, (0, 0, 0, -grid[1] % columns, 0, -grid[0] % rows)).roll((-down, -right), (1, 2))
        across = torch.unflatten(maps, 2, (-1, columns))
        return torch.unflatten(across, 1, (-1, rows)).transpose(2, 3).flatten(3, 4)

    def _paste(self, windows: Tensor, grid: tuple[int, int]) -> Tensor:
        """What `_cut` was given."""
        maps = torch.unflatten(windows, 3, self.window).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return maps.roll(self._shifted(grid), (1, 2))[:, : grid[0], : grid[1]]

    def _apart(self, numbers: Tensor, grid: tuple[int, int]) -> Tensor:
        """Which tokens of a window are no neighbors: `(windows, M, M)`."""
        down, right = self._shifted(grid)
        row, column = (numbers - 1) // grid[1], (numbers - 1) % grid[1]
        part = torch.where(numbers == 0, 4, 2 * (row < down) + (column < right))  # the first rows were rolled to the end
        return part[:, :, None] != part[:, None]


def _spread(weights: Tensor, numbers: Tensor, tokens: int) -> Tensor:
    """`(B windows, heads, M, M)` as `(B, heads, tokens, tokens)`, by the tokens' numbers from 1; 0 is padding."""
    weights = torch.unflatten(weights, 0, (-1, numbers.shape[0])).transpose(1, 2)
    spread = weights.new_zeros(*weights.shape[:2], tokens + 1, tokens + 1)
    spread[:, :, numbers[:, :, None], numbers[:, None]] = weights
    return spread[:, :, 1:, 1:]


def _pair(what: str, value: int | tuple[int, int], low: int) -> tuple[int, int]:
    rows, columns = value if isinstance(value, tuple) else (value, value)
    return at_least(what, rows, low), at_least(what, columns, low)
