"""Spatial transformers: a learned window, sampled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.publish import publish
from visattn.errors import ShapeError
from visattn.geometry import affine_corners
from visattn.nn.feature_maps import exact, sample, wide
from visattn.nn.shapes import at_least, check_maps, is_traced, shape_text


class SpatialTransformer(nn.Module):
    """Spatial transformer: a small network chooses an affine window of the input, which is resampled to the output.

    `theta = W f(x) + b`, `(B, 2, 3)`; the output at `(u, v)` in `[-1, 1]` is the input at `theta (u, v, 1)`, between its pixels, and 0
    outside. `-1` and `1` are the outer edges of the image, as with `align_corners=False`, both in making positions and in sampling.

    It starts as the identity: `W` is zero. Positions are in float32 at least, also under autocast. Where a window lies wholly outside,
    its gradient is zero, so `f` and `W` are often given a smaller step than the rest.

    Args:
        channels: C.
        localization: `f`, from `(B, C, H, W)` to `(B, features)`. By default two convolutions with a pool to 4 x 4 between.
        features: How many numbers `f` gives.
        attention: Whether the window may only be scaled and shifted: `theta` is `[[s, 0, x], [0, s, y]]`, of three numbers.
        size: Height and width of the output; the input's by default.

    Shape:
        `(B, C, H, W)` to `(B, C, *size)`.

    Publishes:
        `transform`, `(B, 2, 3)`: `theta`, from output to input, x first.

    Raises:
        OptionError: If a number is below 1.
        ShapeError: In the forward, if the input is not `(B, C, H, W)`, or `f` gives another number of features.

    Reference:
        Jaderberg et al., "Spatial Transformer Networks", NeurIPS 2015, arXiv:1506.02025, which leaves `f` to the task.
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
        """Show the window that was chosen."""
        check_maps(self, x, self.channels)
        seen = self.localization(x)
        if not is_traced(x) and (seen.ndim != 2 or seen.shape[1] != self.theta.in_features):
            raise ShapeError(
                f"localization must give (B, {self.theta.in_features}), got {shape_text(seen)}. "
                "Tell SpatialTransformer how many features it gives."
            )
        with exact(x):
            numbers = wide(self.theta(seen.to(self.theta.weight.dtype)))
            if self.attention:
                scale, zero = numbers[:, 0], torch.zeros_like(numbers[:, 0])
                numbers = torch.stack((scale, zero, numbers[:, 1], zero, scale, numbers[:, 2]), 1)
            theta = torch.unflatten(numbers, 1, (2, 3))
            publish(self, "transform", theta, x)
            height, width = self.size or (x.shape[2], x.shape[3])
            positions = F.affine_grid(theta, [x.shape[0], x.shape[1], height, width], align_corners=False)
        return sample(x, positions)

    @staticmethod
    def corners(theta: Tensor) -> Tensor:
        """Where the corners of the output lie on the input, for pictures.

        Args:
            theta: `(B, 2, 3)`, as published.

        Returns:
            `(B, 4, 2)`, each (y, x), of which the image covers `[0, 1]`; in the order top left, top right, bottom right, bottom left
            of the output.

        Raises:
            ShapeError: If `theta` is not `(B, 2, 3)`.
        """
        if theta.shape[1:] != (2, 3):
            raise ShapeError(f"theta must be (B, 2, 3), got {shape_text(theta)}. Pass what SpatialTransformer publishes.")
        return theta.new_tensor([affine_corners(one) for one in theta.tolist()])


def _localization(channels: int, features: int) -> nn.Sequential:
    """A network that sees where things are, for maps of any size."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Conv2d(16, features, 4),
        nn.ReLU(),
        nn.Flatten(),
    )
