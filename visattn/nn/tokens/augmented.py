"""Attention-augmented convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visattn.errors import OptionError, ShapeError
from visattn.nn.feature_maps import attend, grid, tokens
from visattn.nn.shapes import at_least, check_maps, is_traced


class AttentionAugmentedConv2d(nn.Module):
    """Attention-augmented convolution: some channels come from a convolution, the others from attention over all places.

    `y = [conv(x), W MHA(x)]`, and in each head `A_ij = softmax_j((q_i . k_j + q_i . r_(row j - row i) + q_i . s_(column j - column
    i)) / sqrt(d))`, with offsets `r` and `s` that all heads share. `q`, `k` and `v` are 1 x 1 convolutions.

    Args:
        in_channels: Channels of the input.
        out_channels: Those of the output.
        kernel: Side of the convolution, odd.
        heads: Number of heads.
        key_width: Channels of queries and keys of all heads; by default a fifth of `out_channels`, to the next multiple of the heads.
        value_width: Channels of values, which are those of the output that come from attention; likewise. With all of them there is
            no convolution.
        size: Height and width of the largest map, for offsets; None leaves them out.
        bias: Whether convolutions have biases.

    Shape:
        `(B, in_channels, H, W)` to `(B, out_channels, H, W)`; with `need_weights` also `A`, `(B, heads, H * W, H * W)`, (query, key);
        rows sum to 1.

    Publishes:
        Nothing: no numbers are multiplied by `A`.

    Raises:
        OptionError: If a number is below 1, the kernel even, or a width no multiple of the heads or too large.
        ShapeError: In the forward, if the input is not `(B, in_channels, H, W)`, or larger than `size`.

    Reference:
        Bello et al., "Attention Augmented Convolutional Networks", ICCV 2019, arXiv:1904.09925, whose widths are a tenth or a fifth,
        with at least 20 key channels in a head for small networks. Differs: smaller maps than `size` use the middle of the offsets,
        and a stride is left to a pool behind.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel: int = 3,
        heads: int = 8,
        key_width: int | None = None,
        value_width: int | None = None,
        size: tuple[int, int] | None = None,
        bias: bool = True,
    ) -> None:
        """Build with PyTorch's initial values of a convolution, and offsets from a normal distribution."""
        super().__init__()
        fifth = -(-at_least("channels", out_channels) // (5 * at_least("heads", heads))) * heads
        key_width, value_width = (fifth if width is None else width for width in (key_width, value_width))
        if at_least("kernel", kernel) % 2 == 0:
            raise OptionError(f"kernel must be odd, got {kernel}: an even one changes the size.")
        if at_least("key_width", key_width) % heads or at_least("value_width", value_width) % heads:
            raise OptionError(f"widths must be multiples of the {heads} heads, got {key_width} and {value_width}.")
        if value_width > out_channels:
            raise OptionError(f"value_width must be at most the {out_channels} channels of the output, got {value_width}.")
        self.channels, self.heads, self.size = in_channels, heads, size
        self.scale = (key_width // heads) ** -0.5
        left = at_least("channels", in_channels) and out_channels - value_width
        self.conv = nn.Conv2d(in_channels, left, kernel, padding=kernel // 2, bias=bias) if left else None
        self.query = nn.Conv2d(in_channels, key_width, 1, bias=bias)
        self.key = nn.Conv2d(in_channels, key_width, 1, bias=bias)
        self.value = nn.Conv2d(in_channels, value_width, 1, bias=bias)
        self.output = nn.Conv2d(value_width, value_width, 1, bias=bias)
        if size is not None:
            self.rows, self.columns = (
                nn.Parameter(torch.randn(2 * at_least("size", side) - 1, key_width // heads) * self.scale) for side in size
            )

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Convolve, attend, and put both side by side."""
        check_maps(self, x, self.channels)
        query, key, value = (tokens(one(x), self.heads) for one in (self.query, self.key, self.value))
        bias = None if self.size is None else self._offsets(x, query, *self.size)
        mixed, weights = attend(query, key, value, scale=self.scale, bias=bias, need_weights=need_weights)
        y: Tensor = self.output(grid(mixed, x))
        if self.conv is not None:
            y = torch.cat((self.conv(x), y), 1)
        return y if weights is None else (y, weights)

    def _offsets(self, x: Tensor, query: Tensor, rows: int, columns: int) -> Tensor:
        """What the offsets add to the scores, `(B, heads, H * W, H * W)`."""
        height, width = x.shape[2], x.shape[3]
        if not is_traced(x) and (height > rows or width > columns):
            raise ShapeError(f"maps must be at most {rows} x {columns}, got {height} x {width}. Build it for the largest one.")
        query = torch.unflatten(query, 2, (height, width))  # (B, heads, H, W, d)
        by_row = torch.einsum("bhrcd,rdk->bhrck", query, _between(self.rows, rows, height))
        by_column = torch.einsum("bhrcd,cdk->bhrck", query, _between(self.columns, columns, width))
        offsets: Tensor = (by_row.unsqueeze(5) + by_column.unsqueeze(4)).flatten(4).flatten(2, 3) * self.scale
        return offsets


def _between(table: Tensor, most: int, side: int) -> Tensor:
    """`(side, d, side)`: the offset from each row or column to each other, out of `2 * most - 1` of them."""
    windows: Tensor = table[most - side : most + side - 1].unfold(0, side, 1)
    return windows.flip(0)
