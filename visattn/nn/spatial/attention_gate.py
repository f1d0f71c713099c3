"""Attention gates of Attention U-Net."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from visattn._support.checks import at_least
from visattn._support.publish import publish
from visattn.nn.shape_checks import bottleneck, check_maps, normed


class AttentionGate(nn.Module):
    """Attention gate of Attention U-Net: features of a coarser level gate the positions of a skip connection.

    `g = sigmoid(BN(w relu(BN(W_g up(gate)) + BN(W_x x))))`, with 1x1 convolutions and bilinear upsampling `up` to the size of x; `y = x g`.
    Place it on each skip connection, before the concatenation.

    Args:
        channels: Number of channels of the skip connection, C.
        reduction: Reduction ratio. The bottleneck has `C // reduction` channels, at least 1.
        width: Number of channels in the bottleneck; overrides `reduction`.
        gate_channels: Number of channels of the coarser level, G; C by default.

    Shape:
        Skip connection `(B, C, H, W)` and coarser level `(B, G, h, w)` to `(B, C, H, W)`.

    Publishes:
        `spatial_gate`, `(B, 1, H, W)`, in `(0, 1)`.

    Raises:
        OptionError: If a width is below 1.
        ShapeError: In the forward pass, if an input has another shape, or if a batch norm in training mode gets one value per channel.

    Reference:
        Oktay et al., "Attention U-Net: Learning Where to Look for the Pancreas", MIDL 2018, arXiv:1804.03999. Differs: it is for images
        instead of volumes. As in most U-Nets with this gate, the gate has batch norms and is computed at the resolution of x; the paper has
        no norms there and uses the coarser resolution. The convolutions have no bias, because norms follow.
    """

    def __init__(self, channels: int, reduction: int = 2, *, width: int | None = None, gate_channels: int | None = None) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        hidden = bottleneck(channels, reduction, width)
        self.channels = channels
        self.gate_channels = channels if gate_channels is None else at_least("gate_channels", gate_channels)
        self.from_gate = nn.Conv2d(self.gate_channels, hidden, 1, bias=False)
        self.norm_gate = nn.BatchNorm2d(hidden)
        self.from_x = nn.Conv2d(channels, hidden, 1, bias=False)
        self.norm_x = nn.BatchNorm2d(hidden)
        self.psi = nn.Conv2d(hidden, 1, 1, bias=False)
        self.norm_psi = nn.BatchNorm2d(1)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Scale each position of `x` by a gate computed from `x` and `gate`."""
        check_maps(self, x, self.channels)
        check_maps(self, gate, self.gate_channels)
        # A 1x1 convolution and a resize commute; convolving the coarse map is cheaper
        asked = functional.interpolate(self.from_gate(gate), size=x.shape[2:], mode="bilinear", align_corners=False)
        matched = (normed(self.norm_gate, asked) + normed(self.norm_x, self.from_x(x))).relu()  # (B, width, H, W)
        spatial_gate = normed(self.norm_psi, self.psi(matched)).sigmoid()  # (B, 1, H, W)
        publish(self, "spatial_gate", spatial_gate, x)
        return x * spatial_gate
