"""Bottleneck attention module (BAM)."""

from __future__ import annotations

from typing import get_args

from torch import Tensor, nn

from visattn._support.checks import at_least, one_of
from visattn._support.publish import publish
from visattn._support.types import Variant
from visattn.nn.shape_checks import bottleneck, check_maps, normed


class BAM(nn.Module):
    """Bottleneck attention: a channel branch and a spatial branch together form one gate, which amplifies the input.

    `M_c = W2 relu(BN(W1 mean(x)))`, `M_s = conv(f(f(r(x))))`, where `r` is a 1x1 and `f` a dilated 3x3 convolution, each with norm and
    ReLU, and `conv` a 1x1 convolution to one channel; `M = sigmoid(M_c M_s)` and `y = x (1 + M)`. Place it between the stages of a network
    (three per ResNet), not inside its blocks. Before training it multiplies by about 1.5.

    Args:
        channels: Number of channels, C.
        reduction: Reduction ratio. Both bottlenecks have `C // reduction` channels, at least 1.
        width: Number of channels in both bottlenecks; overrides `reduction`.
        dilation: Dilation of the 3x3 convolutions. If a map has fewer rows (or columns) than this, the outer kernel rows (or columns) read
            only padding.
        variant: `official`: multiply the branches, as the authors' code does, whose checkpoints `load_checkpoint` accepts. `paper`: add
            them, `M = sigmoid(M_c + M_s)`.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`.

    Publishes:
        `gate`, `(B, C, H, W)`: the factor on x, `1 + M`, in `(1, 2)`.

    Raises:
        OptionError: If a width or the dilation is below 1, or the variant is unknown.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`, or if a batch norm in training mode gets one value per channel.

    Reference:
        Park et al., "BAM: Bottleneck Attention Module", BMVC 2018, arXiv:1807.06514. Differs from the authors' code, which averages over a
        square of the map's height: here the mean is over the whole map. On square maps the two are equal.
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        *,
        width: int | None = None,
        dilation: int = 4,
        variant: Variant = "official",
    ) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        one_of(variant, get_args(Variant), "variant of BAM")
        at_least("dilation", dilation)
        hidden = bottleneck(channels, reduction, width)
        self.channels, self.variant = channels, variant
        self.fc1 = nn.Conv2d(channels, hidden, 1)
        self.norm = nn.BatchNorm2d(hidden)
        self.fc2 = nn.Conv2d(hidden, channels, 1)
        dilated = [nn.Conv2d(hidden, hidden, 3, padding=dilation, dilation=dilation) for _ in range(2)]
        self.convs = nn.ModuleList([nn.Conv2d(channels, hidden, 1), *dilated])
        self.norms = nn.ModuleList(nn.BatchNorm2d(hidden) for _ in self.convs)
        self.plane = nn.Conv2d(hidden, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gate."""
        check_maps(self, x, self.channels)
        channel = self.fc2(normed(self.norm, self.fc1(x.mean((2, 3), keepdim=True))).relu())  # (B, C, 1, 1)
        features = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            features = normed(norm, conv(features)).relu()  # (B, width, H, W)
        spatial = self.plane(features)  # (B, 1, H, W)
        gate: Tensor = 1 + (channel * spatial if self.variant == "official" else channel + spatial).sigmoid()  # (B, C, H, W)
        publish(self, "gate", gate, x)
        return x * gate
