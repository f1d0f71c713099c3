"""Triplet attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn._support.publish import publish
from visattn.nn.shape_checks import check_maps, normed, odd


class TripletAttention(nn.Module):
    """Triplet attention: one gate for each pair of axes, computed from the maximum and the mean over the third axis.

    For rows and columns, `g = sigmoid(BN(conv([max_c x, mean_c x])))`. For channels and columns, `max` and `mean` are over the rows; for
    rows and channels, over the columns. `y = x (g_1 + g_2 + g_3) / 3`. Place it on the residual branch, after its last norm and before the
    addition. The number of parameters does not depend on C.

    Args:
        channels: Number of channels, C; only checked against the input.
        kernel_size: Kernel size of the convolutions, odd.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`.

    Publishes:
        `gate`, `(B, C, H, W)`: the mean of the three gates, in `(0, 1)`.

    Raises:
        OptionError: If the kernel size is even or a number is below 1.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`, or if a batch norm in training mode gets one value per channel.

    Reference:
        Misra et al., "Rotate to Attend: Convolutional Triplet Attention Module", WACV 2021, arXiv:2010.03045. Differs in the order of
        operations: the gates are averaged and x is multiplied once, while the paper averages three products.
    """

    def __init__(self, channels: int, *, kernel_size: int = 7) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        self.channels = at_least("channels", channels)
        odd("kernel_size", kernel_size)
        self.convs = nn.ModuleList(nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(1, momentum=0.01) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the mean of the three gates."""
        check_maps(self, x, self.channels)
        gate = (self._gate(x, 1) + self._gate(x, 2) + self._gate(x, 3)) / 3
        publish(self, "gate", gate, x)
        return x * gate

    def _gate(self, x: Tensor, axis: int) -> Tensor:
        """Compute the gate that pools over `axis`: the shape of x, with length 1 on that axis."""
        pooled = torch.cat([x.amax(axis, keepdim=True), x.mean(axis, keepdim=True)], dim=axis)
        plane = self.convs[axis - 1](pooled.transpose(1, axis))  # (B, 1, ...): the pooled axis becomes the two input channels
        return normed(self.norms[axis - 1], plane).sigmoid().transpose(1, axis)
