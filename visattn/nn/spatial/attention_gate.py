"""Attention gates of Attention U-Net."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from visattn._support.publish import publish
from visattn.nn.shapes import at_least, bottleneck, check_maps, normed


class AttentionGate(nn.Module):
    """The attention gate of Attention U-Net: a coarser level decides which places of a skip connection pass.

    `g = sigmoid(BN(w relu(BN(W_g up(gate)) + BN(W_x x))))`, with 1x1 convolutions and `up` bilinear to the grid of x; `y = x g`.
    It belongs on each skip connection, before the concatenation.

    Args:
        channels: C, of the skip connection.
        reduction: The bottleneck has `C // reduction` channels, at least 1.
        width: The bottleneck's channels, in the place of `reduction`.
        gate_channels: G, of the coarser level; by default C.

    Shape:
        `(B, C, H, W)` and `(B, G, h, w)` to `(B, C, H, W)`.

    Publishes:
        `spatial_gate`, `(B, 1, H, W)`, in `(0, 1)`.

    Raises:
        OptionError: If a width is below 1.
        ShapeError: In the forward, if an input is not of its shape, or a norm trains on a single value.

    Reference:
        Oktay et al., "Attention U-Net: Learning Where to Look for the Pancreas", MIDL 2018, arXiv:1804.03999. Differs: for images in
        the place of volumes, with batch norms in the gate, and compared on the grid of x, as most U-Nets with this gate do; the
        paper has no norms there and compares on the coarser grid. Biases are left to the norms.
    """

    def __init__(self, channels: int, reduction: int = 2, *, width: int | None = None, gate_channels: int | None = None) -> None:
        """Build with PyTorch's initial values of a convolution."""
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
        """Let through the places of `x` that `gate` asks for."""
        check_maps(self, x, self.channels)
        check_maps(self, gate, self.gate_channels)
        # A 1x1 convolution and a resampling may be swapped, and the coarse grid is the cheaper one
        asked = functional.interpolate(self.from_gate(gate), size=x.shape[2:], mode="bilinear", align_corners=False)
        matched = (normed(self.norm_gate, asked) + normed(self.norm_x, self.from_x(x))).relu()
        spatial_gate = normed(self.norm_psi, self.psi(matched)).sigmoid()  # (B, 1, H, W)
        publish(self, "spatial_gate", spatial_gate, x)
        return x * spatial_gate
