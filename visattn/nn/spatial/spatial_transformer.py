"""Spatial transformers: sampling from a predicted affine window."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn._support.publish import publish
from visattn.core.geometry import affine_corners
from visattn.errors import ShapeError
from visattn.nn.positions import exact, sample, wide
from visattn.nn.shape_checks import check_maps, is_traced, shape_text


class SpatialTransformer(nn.Module):
    """Spatial transformer: a small network predicts an affine window of the input, which is resampled to the output size.

    `theta = W f(x) + b`, `(B, 2, 3)`. The output at `(u, v)` in `[-1, 1]` is the input at `theta (u, v, 1)`, interpolated bilinearly, and 0
    outside. `-1` and `1` are the outer edges of the image (`align_corners=False`), both for the sampling grid and for sampling.

    It starts as the identity, because `W` is zero. Positions are in at least float32, also under autocast. If a window lies entirely
    outside the image, its gradient is zero, so `f` and `W` are often trained with a smaller learning rate than the rest.

    Args:
        channels: Number of channels, C.
        localization: Localization network `f`, from `(B, C, H, W)` to `(B, features)`. By default two convolutions with adaptive pooling to
            4 x 4 between them.
        features: Number of features that `f` returns.
        attention: Whether the window is only scaled and shifted: `theta` is `[[s, 0, x], [0, s, y]]`, with three free numbers.
        size: Height and width of the output; those of the input by default.

    Shape:
        `(B, C, H, W)` to `(B, C, *size)`.

    Publishes:
        `transform`, `(B, 2, 3)`: `theta`, which maps output coordinates to input coordinates, x first.

    Raises:
        OptionError: If a number is below 1.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`, or if `f` returns another number of features.

    Reference:
        Jaderberg et al., "Spatial Transformer Networks", NeurIPS 2015, arXiv:1506.02025, which leaves the choice of `f` to the task.
    """

    def __init__(
        self,
        channels: int,
        *,
        localization: nn.Module | None = None,
        features: int = 32,
        attention: bool = False,
        size: tuple[int, int] | None = None,
    ) -> None:
        """Build as the identity."""
        super().__init__()
        at_least("features", features)
        self.channels, self.attention = at_least("channels", channels), attention
        self.size = size and (at_least("height", size[0]), at_least("width", size[1]))
        self.localization = _localization(channels, features) if localization is None else localization
        self.theta = nn.Linear(features, 3 if attention else 6)
        nn.init.zeros_(self.theta.weight)
        with torch.no_grad():
            self.theta.bias.copy_(torch.tensor((1.0, 0, 0) if attention else (1.0, 0, 0, 0, 1, 0)))

    def forward(self, x: Tensor) -> Tensor:
        """Sample the predicted window."""
        check_maps(self, x, self.channels)
        seen = self.localization(x)  # (B, features)
        if not is_traced(x) and (seen.ndim != 2 or seen.shape[1] != self.theta.in_features):
            raise ShapeError(
                f"localization must return (B, {self.theta.in_features}), got {shape_text(seen)}. "
                "Set features= of SpatialTransformer to the width that it returns."
            )
        with exact(x):
            numbers = wide(self.theta(seen.to(self.theta.weight.dtype)))
            if self.attention:
                scale, zero = numbers[:, 0], torch.zeros_like(numbers[:, 0])
                numbers = torch.stack((scale, zero, numbers[:, 1], zero, scale, numbers[:, 2]), 1)
            theta = torch.unflatten(numbers, 1, (2, 3))  # (B, 6) -> (B, 2, 3)
            publish(self, "transform", theta, x)
            height, width = self.size or (x.shape[2], x.shape[3])
            positions = F.affine_grid(theta, [x.shape[0], x.shape[1], height, width], align_corners=False)
        return sample(x, positions)

    @staticmethod
    def corners(theta: Tensor) -> Tensor:
        """Compute where the corners of the output lie on the input, for figures.

        Args:
            theta: `(B, 2, 3)`, as published.

        Returns:
            `(B, 4, 2)`, each corner as (y, x), where the image spans `[0, 1]`. The order is top left, top right, bottom right, bottom left
            of the output.

        Raises:
            ShapeError: If `theta` is not `(B, 2, 3)`.
        """
        if theta.shape[1:] != (2, 3):
            raise ShapeError(
                f"theta must be (B, 2, 3), got {shape_text(theta)}. Pass the transform that SpatialTransformer publishes."
            )
        return theta.new_tensor([affine_corners(one) for one in theta.tolist()])


def _localization(channels: int, features: int) -> nn.Sequential:
    """Build the default localization network, which accepts maps of any size and keeps a coarse 4 x 4 layout."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Conv2d(16, features, 4),
        nn.ReLU(),
        nn.Flatten(),
    )
