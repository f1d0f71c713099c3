"""Stand-alone self-attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn.errors import OptionError
from visattn.nn.feature_maps import attend, grid, tokens
from visattn.nn.shapes import at_least, check_maps


class StandAloneSelfAttention(nn.Module):
    """Stand-alone self-attention: in the place of a convolution, each place attends to the places around it.

    `A_ij,ab = softmax_ab(q_ij . k_ab + q_ij . r_(a-i, b-j))`, `y_ij = sum_ab A_ij,ab v_ab` in each head, over the `kernel` x
    `kernel` places around `ij`; `r` is a learned row offset in the first half of a head's numbers and a learned column offset in the
    second. Places beyond the image have no weight.

    Args:
        in_channels: Channels of the input.
        out_channels: Those of the output, a multiple of twice the heads; as many as come in by default.
        kernel: Side of the neighborhood, odd.
        heads: Number of heads.

    Shape:
        `(B, in_channels, H, W)` to `(B, out_channels, H, W)`; with `need_weights` also `A`, `(B, heads, H, W, kernel, kernel)`: the
        query's row and column, then the key's, counted from the neighborhood's top left. Each neighborhood sums to 1.

    Publishes:
        Nothing: no numbers are multiplied by `A`.

    Raises:
        OptionError: If a number is below 1, the kernel even, or the output's channels no multiple of twice the heads.
        ShapeError: In the forward, if the input is not `(B, in_channels, H, W)`.

    Reference:
        Ramachandran et al., "Stand-Alone Self-Attention in Vision Models", NeurIPS 2019, arXiv:1906.05909, whose strided layers are
        this one and an average pool of 2 x 2. The paper has no scale, and says neither what lies beyond the image nor how offsets
        start. Widespread ports multiply queries and keys number by number, which is attention in each channel, and give the zeros
        around the image a share.
    """

    def __init__(self, in_channels: int, out_channels: int | None = None, *, kernel: int = 7, heads: int = 8) -> None:
        """Build with PyTorch's initial values of a convolution, and offsets from a normal distribution."""
        super().__init__()
        out_channels = at_least("channels", in_channels) if out_channels is None else at_least("channels", out_channels)
        if at_least("kernel", kernel) % 2 == 0:
            raise OptionError(f"kernel must be odd, got {kernel}: an even one has no center.")
        if out_channels % (2 * at_least("heads", heads)):
            raise OptionError(f"channels must be a multiple of twice the {heads} heads, got {out_channels}. Choose other heads.")
        width = out_channels // heads
        self.channels, self.kernel, self.heads = in_channels, kernel, heads
        self.query = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.key = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.value = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.rows = nn.Parameter(torch.randn(heads, kernel, width // 2) * width**-0.5)
        self.columns = nn.Parameter(torch.randn(heads, kernel, width // 2) * width**-0.5)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each place to those around it."""
        check_maps(self, x, self.channels)
        query = tokens(self.query(x), self.heads)  # (B, heads, H * W, d)
        half = query.shape[-1] // 2
        by_row = query[..., :half] @ self.rows.transpose(1, 2)  # (B, heads, H * W, kernel)
        by_column = query[..., half:] @ self.columns.transpose(1, 2)
        bias = (by_row.unsqueeze(4) + by_column.unsqueeze(3)).flatten(3)
        outside = self._around(torch.ones_like(x[:1, :1]), 1)[..., 0] == 0  # (1, 1, H * W, kernel * kernel)
        bias = bias.masked_fill(outside, -torch.inf).unsqueeze(3)
        key, value = self._around(self.key(x), self.heads), self._around(self.value(x), self.heads)
        y, weights = attend(query.unsqueeze(3), key, value, scale=1.0, bias=bias, need_weights=need_weights)
        y = grid(y.squeeze(3), x)
        if weights is None:
            return y
        return y, torch.unflatten(torch.unflatten(weights.squeeze(3), 3, (self.kernel, self.kernel)), 2, x.shape[2:])

    def _around(self, x: Tensor, heads: int) -> Tensor:
        """The neighborhood of each place, `(B, heads, H * W, kernel * kernel, d)`, with zeros beyond the image."""
        patches = F.unfold(x, self.kernel, padding=self.kernel // 2)  # (B, heads * d * kernel * kernel, H * W)
        return torch.unflatten(patches, 1, (heads, -1, self.kernel**2)).permute(0, 1, 4, 3, 2)
