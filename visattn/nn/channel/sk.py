"""Selective kernels (SK)."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn._support.publish import publish
from visattn.errors import OptionError
from visattn.nn.shape_checks import bottleneck, check_maps, normed


class SelectiveKernel(nn.Module):
    """Selective kernels: parallel convolutions of growing dilation, mixed per channel by weights computed from their sum.

    `U_i = relu(BN(conv_i(x)))`, a 3x3 convolution of dilation `i`; `z = relu(BN(W mean(sum_i U_i)))`; `a = softmax_i(A_i z)`;
    `y = sum_i a_i U_i`. Use it instead of the 3x3 convolution of a block, not in addition to it.

    Args:
        channels: Number of input channels, C.
        reduction: Reduction ratio. The bottleneck has `out_channels // reduction` channels, at least 32.
        width: Number of channels in the bottleneck; overrides `reduction` and may be less than 32.
        out_channels: Number of output channels, D; C by default.
        branches: Number of parallel convolutions.
        groups: Groups of each convolution; by default the greatest common divisor of 32, C and D.
        stride: Stride of each convolution.

    Shape:
        `(B, C, H, W)` to `(B, D, H, W)`; with a stride, H and W become `ceil(H / stride)` and `ceil(W / stride)`.

    Publishes:
        `branch_gate`, `(B, branches, D)`, which sums to 1 over the branches.

    Raises:
        OptionError: If a number is too small or `groups` does not divide C and D.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`, or if a batch norm in training mode gets one value per channel.

    Reference:
        Li et al., "Selective Kernel Networks", CVPR 2019, arXiv:1903.06586. No layer has a bias, as in the authors' code. timm's module of
        this name splits the channels among the branches unless it is built with `split_input=False`.
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        *,
        width: int | None = None,
        out_channels: int | None = None,
        branches: int = 2,
        groups: int | None = None,
        stride: int = 1,
    ) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        wide = channels if out_channels is None else at_least("out_channels", out_channels)
        self.channels, self.out_channels = at_least("channels", channels), wide
        hidden = bottleneck(wide, reduction, width)
        hidden = max(32, hidden) if width is None else hidden
        parts = math.gcd(32, channels, wide) if groups is None else at_least("groups", groups)
        if channels % parts or wide % parts:
            raise OptionError(
                f"groups must divide {channels} and {wide} channels, got {groups}. Leave it out to use a divisor of both."
            )
        at_least("stride", stride)
        reaches = range(1, at_least("branches", branches) + 1)
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, wide, 3, stride, padding=reach, dilation=reach, groups=parts, bias=False) for reach in reaches
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(wide) for _ in reaches)
        self.squeeze = nn.Conv2d(wide, hidden, 1, bias=False)
        self.norm = nn.BatchNorm2d(hidden)
        self.select = nn.Conv2d(hidden, branches * wide, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run all branches and mix them per channel."""
        check_maps(self, x, self.channels)
        branches = [normed(norm, conv(x)).relu() for conv, norm in zip(self.convs, self.norms, strict=True)]  # each (B, D, H, W)
        means = reduce(torch.add, branches).mean((2, 3), keepdim=True)  # (B, D, 1, 1)
        scores = self.select(normed(self.norm, self.squeeze(means)).relu())  # (B, branches * D, 1, 1)
        weights: Tensor = scores.reshape(-1, len(branches), self.out_channels, 1, 1).softmax(1)  # (B, branches, D, 1, 1)
        publish(self, "branch_gate", lambda: weights.flatten(2))
        # Not stacked: a 5-d stack loses the channels-last memory format
        return reduce(torch.add, [branch * weights[:, index] for index, branch in enumerate(branches)])
