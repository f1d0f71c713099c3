"""Stand-alone self-attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn.errors import OptionError
from visattn.nn.positions import attend, grid, tokens
from visattn.nn.shape_checks import check_maps


class StandAloneSelfAttention(nn.Module):
    """Stand-alone self-attention: each position attends to its neighborhood. It replaces a convolution.

    `A_ij,ab = softmax_ab(q_ij . k_ab + q_ij . r_(a-i, b-j))`, `y_ij = sum_ab A_ij,ab v_ab` in each head, over the `kernel_size` x
    `kernel_size` positions around `ij`. The first half of the embedding `r` depends on the row offset, the second half on the column
    offset; both are learned. Positions outside the image get weight 0.

    Args:
        in_channels: Number of input channels.
        out_channels: Number of output channels, a multiple of `2 * num_heads`; `in_channels` by default.
        kernel_size: Side of the neighborhood, odd.
        num_heads: Number of heads.

    Shape:
        `(B, in_channels, H, W)` to `(B, out_channels, H, W)`; with `need_weights` also `A`, `(B, heads, H, W, kernel, kernel)`: the row and
        column of the query, then those of the key, counted from the top left of the neighborhood. Each neighborhood sums to 1.

    Publishes:
        Nothing: attention weights are not gates.

    Raises:
        OptionError: If a number is below 1, the kernel size is even, or `out_channels` is not a multiple of `2 * num_heads`.
        ShapeError: In the forward pass, if the input is not `(B, in_channels, H, W)`.

    Reference:
        Ramachandran et al., "Stand-Alone Self-Attention in Vision Models", NeurIPS 2019, arXiv:1906.05909, whose strided layers are this
        module followed by 2 x 2 average pooling. The paper has no scale, and specifies neither the padding nor the initialization of the
        embeddings. Widespread ports multiply queries and keys elementwise, which is attention per channel, and give weight to the zero
        padding.
    """

    def __init__(self, in_channels: int, out_channels: int | None = None, *, kernel_size: int = 7, num_heads: int = 8) -> None:
        """Build with PyTorch's default initialization; position embeddings are drawn from a normal distribution."""
        super().__init__()
        out_channels = at_least("in_channels", in_channels) if out_channels is None else at_least("out_channels", out_channels)
        if at_least("kernel_size", kernel_size) % 2 == 0:
            raise OptionError(f"kernel_size must be odd, got {kernel_size}. An even kernel has no center.")
        if out_channels % (2 * at_least("num_heads", num_heads)):
            raise OptionError(
                f"channels must be a multiple of 2 x {num_heads} heads, got {out_channels}. Choose another num_heads."
            )
        width = out_channels // num_heads
        self.channels, self.kernel_size, self.num_heads = in_channels, kernel_size, num_heads
        self.query = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.key = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.value = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.rows = nn.Parameter(torch.randn(num_heads, kernel_size, width // 2) * width**-0.5)
        self.columns = nn.Parameter(torch.randn(num_heads, kernel_size, width // 2) * width**-0.5)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each position to its neighborhood."""
        check_maps(self, x, self.channels)
        query = tokens(self.query(x), self.num_heads)  # (B, heads, H * W, d)
        half = query.shape[-1] // 2
        by_row = query[..., :half] @ self.rows.transpose(1, 2)  # (B, heads, H * W, kernel)
        by_column = query[..., half:] @ self.columns.transpose(1, 2)
        bias = (by_row.unsqueeze(4) + by_column.unsqueeze(3)).flatten(3)  # (B, heads, H * W, kernel * kernel)
        outside = self._around(torch.ones_like(x[:1, :1]), 1)[..., 0] == 0  # (1, 1, H * W, kernel * kernel)
        bias = bias.masked_fill(outside, -torch.inf).unsqueeze(3)
        key, value = self._around(self.key(x), self.num_heads), self._around(self.value(x), self.num_heads)
        y, weights = attend(query.unsqueeze(3), key, value, scale=1.0, bias=bias, need_weights=need_weights)
        y = grid(y.squeeze(3), x)  # (B, heads, H * W, 1, d) -> (B, out_channels, H, W)
        if weights is None:
            return y
        return y, torch.unflatten(torch.unflatten(weights.squeeze(3), 3, (self.kernel_size, self.kernel_size)), 2, x.shape[2:])

    def _around(self, x: Tensor, num_heads: int) -> Tensor:
        """Extract the neighborhood of each position, `(B, heads, H * W, kernel * kernel, d)`, with zeros outside the image."""
        patches = F.unfold(x, self.kernel_size, padding=self.kernel_size // 2)  # (B, heads * d * kernel * kernel, H * W)
        return torch.unflatten(patches, 1, (num_heads, -1, self.kernel_size**2)).permute(0, 1, 4, 3, 2)
