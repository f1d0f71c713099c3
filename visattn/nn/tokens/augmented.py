"""Attention-augmented convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn.errors import OptionError, ShapeError
from visattn.nn.positions import attend, grid, tokens
from visattn.nn.shape_checks import check_maps, is_traced


class AttentionAugmentedConv2d(nn.Module):
    """Attention-augmented convolution: some channels come from a convolution, the others from attention over all positions.

    `y = [conv(x), W MHA(x)]`. In each head, the weights `A_ij` are the softmax over `j` of `(q_i . k_j + q_i . r_(row j - row i) + q_i .
    s_(column j - column i)) / sqrt(d)`. All heads share the relative position embeddings `r` and `s`. `q`, `k` and `v` are 1 x 1
    convolutions.

    Args:
        in_channels: Number of input channels.
        out_channels: Number of output channels.
        kernel_size: Kernel size of the convolution, odd.
        num_heads: Number of heads.
        key_dim: Number of query and key channels over all heads; by default a fifth of `out_channels`, rounded up to a multiple of
            `num_heads`.
        value_dim: Number of value channels over all heads, which is the number of output channels that come from attention. The default is
            that of `key_dim`. If it equals `out_channels`, there is no convolution.
        size: Height and width of the largest map, for relative position embeddings. None leaves them out.
        bias: Whether the convolutions have a bias.

    Shape:
        `(B, in_channels, H, W)` to `(B, out_channels, H, W)`; with `need_weights` also `A`, `(B, heads, H * W, H * W)`, (query, key), whose
        rows sum to 1.

    Publishes:
        Nothing: attention weights are not gates.

    Raises:
        OptionError: If a number is below 1, the kernel size is even, or a width is too large or not a multiple of `num_heads`.
        ShapeError: In the forward pass, if the input is not `(B, in_channels, H, W)` or is larger than `size`.

    Reference:
        Bello et al., "Attention Augmented Convolutional Networks", ICCV 2019, arXiv:1904.09925, who use a tenth or a fifth of the channels,
        with at least 20 key channels per head in small networks. Differs: maps smaller than `size` use the middle of the embeddings, and
        there is no stride: pool the output instead.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: int = 3,
        num_heads: int = 8,
        key_dim: int | None = None,
        value_dim: int | None = None,
        size: tuple[int, int] | None = None,
        bias: bool = True,
    ) -> None:
        """Build with PyTorch's default initialization; position embeddings are drawn from a normal distribution."""
        super().__init__()
        fifth = -(-at_least("out_channels", out_channels) // (5 * at_least("num_heads", num_heads))) * num_heads
        key_dim, value_dim = (fifth if width is None else width for width in (key_dim, value_dim))
        if at_least("kernel_size", kernel_size) % 2 == 0:
            raise OptionError(f"kernel_size must be odd, got {kernel_size}. An even kernel changes the size of the map.")
        if at_least("key_dim", key_dim) % num_heads or at_least("value_dim", value_dim) % num_heads:
            raise OptionError(f"key_dim and value_dim must be multiples of num_heads={num_heads}, got {key_dim} and {value_dim}.")
        if value_dim > out_channels:
            raise OptionError(f"value_dim must be at most out_channels={out_channels}, got {value_dim}.")
        self.channels, self.num_heads, self.size = in_channels, num_heads, size
        self.scale = (key_dim // num_heads) ** -0.5
        left = at_least("in_channels", in_channels) and out_channels - value_dim
        self.conv = nn.Conv2d(in_channels, left, kernel_size, padding=kernel_size // 2, bias=bias) if left else None
        self.query = nn.Conv2d(in_channels, key_dim, 1, bias=bias)
        self.key = nn.Conv2d(in_channels, key_dim, 1, bias=bias)
        self.value = nn.Conv2d(in_channels, value_dim, 1, bias=bias)
        self.output = nn.Conv2d(value_dim, value_dim, 1, bias=bias)
        if size is not None:
            self.rows, self.columns = (
                nn.Parameter(torch.randn(2 * at_least("side", side) - 1, key_dim // num_heads) * self.scale) for side in size
            )

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Concatenate the outputs of the convolution and of attention."""
        check_maps(self, x, self.channels)
        query, key, value = (tokens(one(x), self.num_heads) for one in (self.query, self.key, self.value))  # (B, heads, H * W, d)
        bias = None if self.size is None else self._offsets(x, query, *self.size)
        mixed, weights = attend(query, key, value, scale=self.scale, bias=bias, need_weights=need_weights)
        y: Tensor = self.output(grid(mixed, x))  # (B, value_dim, H, W)
        if self.conv is not None:
            y = torch.cat((self.conv(x), y), 1)
        return y if weights is None else (y, weights)

    def _offsets(self, x: Tensor, query: Tensor, rows: int, columns: int) -> Tensor:
        """Compute the scores of the relative position embeddings, `(B, heads, H * W, H * W)`."""
        height, width = x.shape[2], x.shape[3]
        if not is_traced(x) and (height > rows or width > columns):
            raise ShapeError(
                f"maps must be at most {rows} x {columns}, got {height} x {width}. Build it with size= of the largest map."
            )
        query = torch.unflatten(query, 2, (height, width))  # (B, heads, H, W, d)
        by_row = torch.einsum("bhrcd,rdk->bhrck", query, _between(self.rows, rows, height))  # (B, heads, H, W, H)
        by_column = torch.einsum("bhrcd,cdk->bhrck", query, _between(self.columns, columns, width))  # (B, heads, H, W, W)
        offsets: Tensor = (by_row.unsqueeze(5) + by_column.unsqueeze(4)).flatten(4).flatten(2, 3) * self.scale
        return offsets


def _between(table: Tensor, most: int, side: int) -> Tensor:
    """Select the embedding of the offset between each pair of rows or columns, `(side, d, side)`, from the `2 * most - 1` in `table`."""
    windows: Tensor = table[most - side : most + side - 1].unfold(0, side, 1)
    return windows.flip(0)
