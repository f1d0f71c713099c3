"""Triplet attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visattn._support.publish import publish
from visattn.nn.shapes import at_least, check_maps, normed, odd


class TripletAttention(nn.Module):
    """Triplet attention: one gate for each pair of axes, each of which sees the third by its largest value and its mean.

    For rows and columns `g = sigmoid(BN(conv([max_c x, mean_c x])))`; likewise for channels and columns, with `max` and `mean` over
    the rows, and for rows and channels, over the columns. `y = x (g_1 + g_2 + g_3) / 3`. It belongs on the residual branch, after
    its last norm and before the addition. The number of its parameters does not depend on C.

    Args:
        channels: C; checked only.
        kernel: Side of the convolutions, odd.

    Shape:
        `(B, C, H, W)` to the same.

    Publishes:
        `gate`, `(B, C, H, W)`: the mean of the three gates, in `(0, 1)`.

    Raises:
        OptionError: If the kernel is even or a number below 1.
        ShapeError: In the forward, if the input is not `(B, C, H, W)`, or a norm trains on a single value.

    Reference:
        Misra et al., "Rotate to Attend: Convolutional Triplet Attention Module", WACV 2021, arXiv:2010.03045. Differs in its way: the
        gates are averaged and x multiplied once, where the paper averages three products.
    """

    def __init__(self, channels: int, *, kernel: int = 7) -> None:
        """Build with PyTorch's initial values of a convolution."""
        super().__init__()
        self.channels = at_least("channels", channels)
        odd("kernel", kernel)
        self.convs = nn.ModuleList(nn.Conv2d(2, 1, kernel, padding=kernel // 2, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(1, momentum=0.01) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Scale by the mean gate."""
        check_maps(self, x, self.channels)
        gate = (self._gate(x, 1) + self._gate(x, 2) + self._gate(x, 3)) / 3
        publish(self, "gate", gate, x)
        return x * gate

    def _gate(self, x: Tensor, axis: int) -> Tensor:
        """The gate that pools `axis`: as x, with length 1 there."""
        pooled = torch.cat([x.amax(axis, keepdim=True), x.mean(axis, keepdim=True)], dim=axis)
        plane = self.convs[axis - 1](pooled.transpose(1, axis))  # the plane's two other axes, in x's order but for the swap
        return normed(self.norms[axis - 1], plane).sigmoid().transpose(1, axis)
