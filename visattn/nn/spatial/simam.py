"""SimAM: a gate without parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn._support.publish import publish
from visattn.errors import OptionError
from visattn.nn.shape_checks import check_maps


class SimAM(nn.Module):
    """SimAM: each position of each channel is scaled by how far it deviates from the channel's mean; there are no parameters.

    `d = (x - mean(x))^2`, `v = sum(d) / (H W - 1)`, `y = x sigmoid(d / (4 (v + regularization)) + 1 / 2)`. Place it on the residual branch,
    after the 3x3 convolution of a block.

    Args:
        channels: Number of channels, C; only checked against the input.
        regularization: The paper's lambda, above 0. The authors' default is 1e-4; their ImageNet networks were trained with 0.1.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`.

    Publishes:
        `gate`, `(B, C, H, W)`, at least 0.62 and at most 1.

    Raises:
        OptionError: If `channels` is below 1 or `regularization` is not above 0.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`.

    Reference:
        Yang et al., "SimAM: A Simple, Parameter-Free Attention Module for Convolutional Neural Networks", ICML 2021. Differs from the
        authors' code: half precision is raised to float32 for the statistics, which would overflow. A map with a single position has
        variance 0 here; that code returns NaN.
    """

    def __init__(self, channels: int, *, regularization: float = 1e-4) -> None:
        """Build; there is nothing to initialize."""
        super().__init__()
        self.channels = at_least("channels", channels)
        if not regularization > 0:
            raise OptionError(f"regularization must be above 0, got {regularization!r}. With 0, a constant channel gives 0 / 0.")
        self.regularization = regularization

    def forward(self, x: Tensor) -> Tensor:
        """Scale each position by its deviation from the channel's mean."""
        check_maps(self, x, self.channels)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        deviation = (wide - wide.mean((2, 3), keepdim=True)).square()  # (B, C, H, W)
        places = torch.ones_like(deviation[:, :1]).sum((2, 3), keepdim=True)  # as a tensor: exporters would fix a number
        variance = deviation.sum((2, 3), keepdim=True) / (places - 1).clamp(min=1)  # (B, C, 1, 1)
        gate = (deviation / (4 * (variance + self.regularization)) + 0.5).sigmoid().to(x.dtype)
        publish(self, "gate", gate, x)
        return x * gate

    def extra_repr(self) -> str:
        """Show the constructor arguments."""
        return f"{self.channels}, regularization={self.regularization}"
