"""Selective kernels (SK)."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor, nn

from visattn._support.publish import publish
from visattn.errors import OptionError
from visattn.nn.shapes import at_least, bottleneck, check_maps, normed


class SelectiveKernel(nn.Module):
    """Selective kernels: convolutions of growing reach side by side, mixed channel by channel by what they see together.

    `U_i = relu(BN(conv_i(x)))`, a 3x3 convolution of dilation `i`; `z = relu(BN(W mean(sum_i U_i)))`; `a = softmax_i(A_i z)`;
    `y = sum_i a_i U_i`. It is no addition to a block but takes the place of its 3x3 convolution.

    Args:
        channels: C.
        reduction: The bottleneck has `out_channels // reduction` channels, at least 32.
        width: The bottleneck's channels, in the place of `reduction`; may be less than 32.
        out_channels: D; by default C.
        branches: How many convolutions.
        groups: Of each convolution; by default 32, or what 32 shares with C and D.
        stride: Of each convolution.

    Shape:
        `(B, C, H, W)` to `(B, D, H, W)`, or one place of every `stride` in H and W.

    Publishes:
        `branch_gate`, `(B, branches, D)`, which sums to 1 over the branches.

    Raises:
        OptionError: If a number is too small or the groups do not divide C and D.
        ShapeError: In the forward, if the input is not `(B, C, H, W)`, or a norm trains on a single value.

    Reference:
        Li et al., "Selective Kernel Networks", CVPR 2019, arXiv:1903.06586. No layer has a bias, as in the authors' code. timm's
        module of this name gives each branch a share of the channels unless it is told `split_input=False`.
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
        """Build with PyTorch's initial values of a convolution."""
        super().__init__()
        wide = channels if out_channels is None else at_least("out_channels", out_channels)
        self.channels, self.out_channels = at_least("channels", channels), wide
        hidden = bottleneck(wide, reduction, width)
        hidden = max(32, hidden) if width is None else hidden
        parts = math.gcd(32, channels, wide) if groups is None else at_least("groups", groups)
        if channels % parts or wide % parts:
            raise OptionError(
                f"groups must divide {channels} and {wide} channels, got {groups}. Leave it out for a number that does."
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
        """Convolve and mix."""
        check_maps(self, x, self.channels)
        branches = [normed(norm, conv(x)).relu() for conv, norm in zip(self.convs, self.norms, strict=True)]
        means = reduce(torch.add, branches).mean((2, 3), keepdim=True)
        scores = self.select(normed(self.norm, self.squeeze(means)).relu())
        weights: Tensor = scores.reshape(-1, len(branches), self.out_channels, 1, 1).softmax(1)  # (B, branches, D, 1, 1)
        publish(self, "branch_gate", lambda: weights.flatten(2))
        # Not stacked: a stack of five axes forgets that channels are last
        return reduce(torch.add, [branch * weights[:, index] for index, branch in enumerate(branches)])
