"""Coordinate attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visattn._support.publish import publish
from visattn.nn.shape_checks import bottleneck, check_maps, normed


class CoordinateAttention(nn.Module):
    """Coordinate attention: each channel has one gate per row and one per column.

    `f = hardswish(BN(W [mean over columns; mean over rows]))` along an axis of length `H + W`, split into `f_h` and `f_w`; `g_h =
    sigmoid(W_h f_h)`, `(B, C, H, 1)`, `g_w = sigmoid(W_w f_w)`, `(B, C, 1, W)`; `y = x g_h g_w`. Place it after the depthwise convolution
    of an inverted residual block, before the projection. Before training it multiplies by about 0.25. Parameter names and shapes are those
    of the authors' code, and of timm's `CoordAttn` with biases.

    Args:
        channels: Number of channels, C.
        reduction: Reduction ratio. The bottleneck has `C // reduction` channels, at least 8.
        width: Number of channels in the bottleneck; overrides `reduction` and may be less than 8.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`.

    Publishes:
        `gate`, `(B, C, H, W)`: `g_h g_w`, in `(0, 1)`.

    Raises:
        OptionError: If a width is below 1.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`.

    Reference:
        Hou, Zhou & Feng, "Coordinate Attention for Efficient Mobile Network Design", CVPR 2021, arXiv:2103.02907.
    """

    def __init__(self, channels: int, reduction: int = 32, *, width: int | None = None) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        hidden = bottleneck(channels, reduction, width)
        hidden = max(8, hidden) if width is None else hidden
        self.channels = channels
        self.conv1 = nn.Conv2d(channels, hidden, 1)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.act = nn.Hardswish()
        self.conv_h = nn.Conv2d(hidden, channels, 1)
        self.conv_w = nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gates of rows and columns."""
        check_maps(self, x, self.channels)
        strips = torch.cat([x.mean(3, keepdim=True), x.mean(2, keepdim=True).transpose(2, 3)], dim=2)  # (B, C, H + W, 1)
        strips = self.act(normed(self.bn1, self.conv1(strips)))  # (B, width, H + W, 1)
        rows, columns = strips[:, :, : x.shape[2]], strips[:, :, x.shape[2] :].transpose(2, 3)
        gate: Tensor = self.conv_h(rows).sigmoid() * self.conv_w(columns).sigmoid()  # (B, C, H, 1) * (B, C, 1, W)
        publish(self, "gate", gate, x)
        return x * gate
