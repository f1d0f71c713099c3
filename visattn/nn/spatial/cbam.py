"""Convolutional block attention module (CBAM)."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn._support.publish import publish
from visattn._support.types import Variant
from visattn.nn.means import mean_over
from visattn.nn.shapes import bottleneck, check_maps, normed, odd


class CBAM(nn.Module):
    """Convolutional block attention: a gate for the channels, then one for the places.

    `g_c = sigmoid(M(mean x) + M(max x))` with one bottleneck `M` for both, `x' = x g_c`;
    `g_s = sigmoid(BN(conv([mean_c x', max_c x'])))`, `y = x' g_s`. It belongs on the residual branch of every block, after its last
    norm and before the addition.

    Args:
        channels: C.
        reduction: The bottleneck has `C // reduction` channels, at least 1.
        width: The bottleneck's channels, in the place of `reduction`.
        kernel: Side of the spatial convolution, odd.
        variant: `official`: the authors' code, whose checkpoints `load_checkpoint` takes: biases in the bottleneck, planes in the
            order max, mean.
            `paper`: no biases, planes in the order mean, max.

    Shape:
        `(B, C, H, W)` to the same.

    Publishes:
        `channel_gate`, `(B, C)`, and `spatial_gate`, `(B, 1, H, W)`, both in `(0, 1)`.

    Raises:
        OptionError: If a width is below 1, the kernel is even or the variant unknown.
        ShapeError: In the forward, if the input is not `(B, C, H, W)`, or the norm trains on a single value.

    Reference:
        Woo et al., "CBAM: Convolutional Block Attention Module", ECCV 2018, arXiv:1807.06521. Differs: the paper does not name the
        norm of the spatial gate, which the authors' code has.
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        *,
        width: int | None = None,
        kernel: int = 7,
        variant: Variant = "official",
    ) -> None:
        """Build with PyTorch's initial values of a convolution."""
        super().__init__()
        one_of(variant, get_args(Variant), "variant of CBAM")
        hidden = bottleneck(channels, reduction, width)
        odd("kernel", kernel)
        biased = variant == "official"
        self.channels, self.variant = channels, variant
        self.fc1 = nn.Conv2d(channels, hidden, 1, bias=biased)
        self.act = nn.ReLU()
        self.fc2 = nn.Conv2d(hidden, channels, 1, bias=biased)
        self.conv = nn.Conv2d(2, 1, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(1, momentum=0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels, then the places."""
        check_maps(self, x, self.channels)
        pooled = mean_over(x, 2, 3), x.amax((2, 3), keepdim=True)  # adaptive pools do not export
        mean, peak = (self.fc2(self.act(self.fc1(one))) for one in pooled)
        channel_gate = (mean + peak).sigmoid()  # (B, C, 1, 1)
        publish(self, "channel_gate", channel_gate)
        x = x * channel_gate
        planes = mean_over(x, 1), x.amax(1, keepdim=True)
        plane = self.conv(torch.cat(planes[::-1] if self.variant == "official" else planes, dim=1))
        spatial_gate = normed(self.norm, plane).sigmoid()  # (B, 1, H, W)
        publish(self, "spatial_gate", spatial_gate, x)
        return x * spatial_gate
