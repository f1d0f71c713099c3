"""Efficient channel attention (ECA)."""

from __future__ import annotations

import math

from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn._support.publish import publish
from visattn.nn.shape_checks import check_maps, odd


class ECA(nn.Module):
    """Efficient channel attention: each channel is scaled by a gate computed from the means of neighboring channels.

    `g = sigmoid(conv1d(mean(x)))`, a convolution over the channel axis with zero padding and no bias; `y = x g`. Place it as
    squeeze-and-excitation: on the residual branch, after its last norm and before the addition.

    Args:
        channels: Number of channels, C. It sets the default kernel size and is checked against the input.
        kernel_size: Number of channels that a gate depends on, odd. By default the paper's rule: `t = (log2(C) + b) / gamma`, rounded down,
            plus 1 if that is even.
        gamma: Divisor in the rule.
        b: Offset in the rule.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`.

    Publishes:
        `channel_gate`, `(B, C)`, in `(0, 1)`.

    Raises:
        OptionError: If a number is too small or the kernel size is even.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`.

    Reference:
        Wang et al., "ECA-Net: Efficient Channel Attention for Deep Convolutional Neural Networks", CVPR 2020, arXiv:1910.03151.
        The released checkpoints do not follow the rule. Their kernel sizes in stages 1 to 4 are 3, 5, 5, 7 in ECA-ResNet-50; 3, 5, 7, 7
        in ECA-ResNet-18; and 3, 3, 5, 7 in the others.
    """

    def __init__(self, channels: int, *, kernel_size: int | None = None, gamma: int = 2, b: int = 1) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        self.channels = at_least("channels", channels)
        steps = int((math.log2(channels) + at_least("b", b, 0)) / at_least("gamma", gamma))
        side = (steps if steps % 2 else steps + 1) if kernel_size is None else odd("kernel_size", kernel_size)
        self.conv = nn.Conv1d(1, 1, side, padding=side // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels."""
        check_maps(self, x, self.channels)
        gate: Tensor = self.conv(x.mean((2, 3)).unsqueeze(1)).sigmoid()  # (B, C) -> (B, 1, C)
        gate = gate.transpose(1, 2).unsqueeze(-1)  # (B, C, 1, 1)
        publish(self, "channel_gate", gate)
        return x * gate
