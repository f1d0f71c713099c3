"""Convolutional block attention module (CBAM)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn._support.publish import is_heard, publish
from visattn._support.types import Variant
from visattn.nn.lean import Gated, PooledChannels, PooledPlaces, is_lean
from visattn.nn.means import mean_over
from visattn.nn.shape_checks import bottleneck, check_maps, normed, odd


class CBAM(nn.Module):
    """Convolutional block attention: a channel gate, then a spatial gate.

    `g_c = sigmoid(M(mean x) + M(max x))` with one shared bottleneck `M`, `x' = x g_c`; `g_s = sigmoid(BN(conv([mean_c x', max_c x'])))`, `y
    = x' g_s`. Place it on the residual branch of every block, after its last norm and before the addition. In training, the backward pass
    keeps `x` and the gates, but neither `x'` nor masks of the maxima.

    Args:
        channels: Number of channels, C.
        reduction: Reduction ratio. The bottleneck has `C // reduction` channels, at least 1.
        width: Number of channels in the bottleneck; overrides `reduction`.
        kernel_size: Kernel size of the spatial convolution, odd.
        variant: `official`: the authors' code, with biases in the bottleneck and pooled planes in the order max, mean; `load_checkpoint`
            accepts its checkpoints. `paper`: no biases, planes in the order mean, max.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`.

    Publishes:
        `channel_gate`, `(B, C)`, and `spatial_gate`, `(B, 1, H, W)`, both in `(0, 1)`.

    Raises:
        OptionError: If a width is below 1, the kernel size is even or the variant is unknown.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`, or if the batch norm in training mode gets one value per
            channel.

    Reference:
        Woo et al., "CBAM: Convolutional Block Attention Module", ECCV 2018, arXiv:1807.06521. Differs: the spatial gate has a batch norm,
        as in the authors' code; the paper does not mention it.
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        *,
        width: int | None = None,
        kernel_size: int = 7,
        variant: Variant = "official",
    ) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        one_of(variant, get_args(Variant), "variant of CBAM")
        hidden = bottleneck(channels, reduction, width)
        odd("kernel_size", kernel_size)
        biased = variant == "official"
        self.channels, self.variant = channels, variant
        self.fc1 = nn.Conv2d(channels, hidden, 1, bias=biased)
        self.act = nn.ReLU()
        self.fc2 = nn.Conv2d(hidden, channels, 1, bias=biased)
        self.conv = nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = nn.BatchNorm2d(1, momentum=0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the channel gate, then the spatial gate."""
        check_maps(self, x, self.channels)
        lean = is_lean(x) and not is_heard()
        x, *pooled = (
            PooledPlaces.apply(x) if lean else PooledPlaces.plain(x)
        )  # each (B, C, 1, 1); adaptive pooling does not export
        mean, peak = self.fc2(self.act(self.fc1(torch.cat(pooled)))).chunk(2)  # one call, since a small one is mostly overhead
        channel_gate = (mean + peak).sigmoid()  # (B, C, 1, 1)
        publish(self, "channel_gate", channel_gate)
        if lean:
            x, *planes = PooledChannels.apply(x, channel_gate)
            return Gated.apply(x, channel_gate, self._spatial_gate(planes))  # type: ignore[no-any-return]
        x = x * channel_gate
        spatial_gate = self._spatial_gate([mean_over(x, 1), x.amax(1, keepdim=True)])
        publish(self, "spatial_gate", spatial_gate, x)
        return x * spatial_gate

    def _spatial_gate(self, planes: Sequence[Tensor]) -> Tensor:
        """Return the gate `(B, 1, H, W)` of planes of that shape, the mean and the maximum over the channels."""
        plane = self.conv(torch.cat([*planes][::-1] if self.variant == "official" else [*planes], dim=1))
        return normed(self.norm, plane).sigmoid()
