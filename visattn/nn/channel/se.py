"""Squeeze-and-excitation (SE)."""

from __future__ import annotations

from torch import Tensor, nn

from visattn._support.publish import publish
from visattn.nn.means import mean_over
from visattn.nn.shape_checks import bottleneck, check_maps


class SqueezeExcite(nn.Module):
    """Squeeze-and-excitation: each channel is scaled by a gate computed from the means of all channels.

    `g = sigmoid(W2 relu(W1 mean(x) + b1) + b2)`, `y = x g`. Place it on the residual branch, after its last norm and before the addition.
    Parameter names and shapes are those of torchvision's `SqueezeExcitation` and timm's `SEModule`.

    Args:
        channels: Number of channels, C.
        reduction: Reduction ratio. The bottleneck has `C // reduction` channels, at least 1.
        width: Number of channels in the bottleneck; overrides `reduction`.
        bias: Whether both layers have a bias; in the published networks they do.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`.

    Publishes:
        `channel_gate`, `(B, C)`, in `(0, 1)`.

    Raises:
        OptionError: If a width is below 1.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`.

    Reference:
        Hu et al., "Squeeze-and-Excitation Networks", CVPR 2018, arXiv:1709.01507.
    """

    def __init__(self, channels: int, reduction: int = 16, *, width: int | None = None, bias: bool = True) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        hidden = bottleneck(channels, reduction, width)
        self.channels = channels
        self.fc1 = nn.Conv2d(channels, hidden, 1, bias=bias)
        self.act = nn.ReLU()
        self.fc2 = nn.Conv2d(hidden, channels, 1, bias=bias)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels."""
        check_maps(self, x, self.channels)
        gate: Tensor = self.gate(self.fc2(self.act(self.fc1(mean_over(x, 2, 3)))))  # (B, C, 1, 1)
        publish(self, "channel_gate", gate)
        return x * gate
