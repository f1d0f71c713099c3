"""Squeeze-and-excitation (SE)."""

from __future__ import annotations

from torch import Tensor, nn

from visattn._support.publish import publish
from visattn.nn.means import mean_over
from visattn.nn.shapes import bottleneck, check_maps


class SqueezeExcite(nn.Module):
    """Squeeze-and-excitation: each channel is scaled by a gate that sees the means of all channels.

    `g = sigmoid(W2 relu(W1 mean(x) + b1) + b2)`, `y = x g`. It belongs on the residual branch, after its last norm and before the
    addition. Names and shapes of its parameters are those of torchvision's `SqueezeExcitation` and timm's `SEModule`.

    Args:
        channels: C.
        reduction: The bottleneck has `C // reduction` channels, at least 1.
        width: The bottleneck's channels, in the place of `reduction`.
        bias: Whether both layers have biases; the published networks have them.

    Shape:
        `(B, C, H, W)` to the same.

    Publishes:
        `channel_gate`, `(B, C)`, in `(0, 1)`.

    Raises:
        OptionError: If a width is below 1.
        ShapeError: In the forward, if the input is not `(B, C, H, W)`.

    Reference:
        Hu et al., "Squeeze-and-Excitation Networks", CVPR 2018, arXiv:1709.01507.
    """

    def __init__(self, channels: int, reduction: int = 16, *, width: int | None = None, bias: bool = True) -> None:
        """Build with PyTorch's initial values of a convolution."""
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
