"""Concurrent spatial and channel squeeze-and-excitation (scSE)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn._support.publish import publish
from visattn.nn.lean import LargerGated, is_lean
from visattn.nn.shape_checks import bottleneck, check_maps

Fusion = Literal["max", "add", "multiply"]


class SCSE(nn.Module):
    """Concurrent spatial and channel squeeze-and-excitation: a channel gate and a spatial gate, combined.

    `g_c = sigmoid(W2 relu(W1 mean(x) + b1) + b2)`, and `g_s = sigmoid(w x + b)` at each position; with `max`, `y = max(x g_c, x g_s)`; with
    `add`, `y = x (g_c + g_s)`; with `multiply`, `y = x g_c g_s`. Place it after each block of the encoder and decoder of a segmentation
    network.

    Args:
        channels: Number of channels, C.
        reduction: Reduction ratio. The bottleneck of the channel gate has `C // reduction` channels, at least 1.
        width: Number of channels in the bottleneck; overrides `reduction`.
        fusion: `max`: as the authors' code. `add`: as the conference paper. `multiply`: one gate after the other.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`.

    Publishes:
        `channel_gate`, `(B, C)`, and `spatial_gate`, `(B, 1, H, W)`, both in `(0, 1)`; then `gate`, `(B, C, H, W)`, the factor on x, in
        `(0, 2)`. With `max` it is the larger gate where x is positive, and the smaller one where x is negative.

    Raises:
        OptionError: If a width is below 1 or `fusion` is unknown.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`.

    Reference:
        Roy, Navab & Wachinger, "Concurrent Spatial and Channel Squeeze & Excitation in Fully Convolutional Networks", MICCAI 2018,
        arXiv:1803.02579. Differs: `max` by default, as in the authors' code, while the paper adds. `multiply` multiplies the gates, because
        the product of the two scaled maps would square x.
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 2,
        *,
        width: int | None = None,
        fusion: Fusion = "max",
    ) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        one_of(fusion, get_args(Fusion), "fusion of SCSE")
        hidden = bottleneck(channels, reduction, width)
        self.channels, self.fusion = channels, fusion
        self.fc1 = nn.Conv2d(channels, hidden, 1)
        self.act = nn.ReLU()
        self.fc2 = nn.Conv2d(hidden, channels, 1)
        self.conv = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both gates."""
        check_maps(self, x, self.channels)
        channel = self.fc2(self.act(self.fc1(x.mean((2, 3), keepdim=True)))).sigmoid()  # (B, C, 1, 1)
        spatial = self.conv(x).sigmoid()  # (B, 1, H, W)
        publish(self, "channel_gate", channel)
        publish(self, "spatial_gate", spatial, x)
        if self.fusion == "max":
            publish(self, "gate", lambda: torch.where(x > 0, torch.maximum(channel, spatial), torch.minimum(channel, spatial)), x)
            return LargerGated.apply(x, channel, spatial) if is_lean(x) else LargerGated.plain(x, channel, spatial)[0]
        gate: Tensor = channel + spatial if self.fusion == "add" else channel * spatial
        publish(self, "gate", gate, x)
        return x * gate
