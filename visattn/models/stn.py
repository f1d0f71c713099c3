"""Classifier behind a spatial transformer, which samples a part of the image for it, at any size and angle.

Jaderberg et al., "Spatial Transformer Networks", NeurIPS 2015, arXiv:1506.02025, section 4.1. The transformer samples a smaller image from
the window that it predicts, and a small CNN classifies that. `transformer=False` is the baseline: the same CNN on the whole image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn.errors import OptionError
from visattn.nn import SpatialTransformer


class TransformedClassifier(nn.Module):
    """Classifier of a window that a spatial transformer predicts: image `(B, C, H, W)` to class scores `(B, num_classes)`."""

    def __init__(
        self,
        *,
        window_size: int = 28,
        start: float = 0.5,
        transformer: bool = True,
        width: int = 16,
        num_classes: int = 10,
        in_channels: int = 1,
    ) -> None:
        """Build with PyTorch's default initialization; the window starts in the middle of the image.

        Args:
            window_size: Side of the sampled window in pixels.
            start: Side of the window at the start, as a share of the image's, above 0 and up to 1. A window of the whole image, as in the
                paper, hardly learns to move: its pixels lie far apart, and their gradients tell little.
            transformer: Whether a window is predicted and sampled. Otherwise the classifier reads the whole image.
            width: Number of channels of the classifier's first convolution; the second has twice as many.
            num_classes: Number of classes.
            in_channels: Number of input channels, C.

        Raises:
            OptionError: If another number is below 1, or `start` is out of range.
        """
        super().__init__()
        if not 0 < start <= 1:
            raise OptionError(f"start must lie in (0, 1], got {start:g}.")
        size = at_least("window_size", window_size), window_size
        for name, number in (("width", width), ("num_classes", num_classes), ("in_channels", in_channels)):
            at_least(name, number)
        self.transformer = (
            SpatialTransformer(in_channels, localization=_finder(in_channels), size=size) if transformer else nn.Identity()
        )
        if isinstance(self.transformer, SpatialTransformer):
            with torch.no_grad():
                self.transformer.theta.bias.mul_(start)
        self.classifier = nn.Sequential(
            nn.Conv2d(in_channels, width, 5, padding=2),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 5, padding=2),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 128),
            nn.ReLU(),
            nn.Linear(128, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Compute class scores."""
        scores: Tensor = self.classifier(self.transformer(images))
        return scores


def _finder(channels: int) -> nn.Sequential:
    """Build the localization network, which keeps a layout of 7 x 7 cells of what it sees."""
    return nn.Sequential(
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 20, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 20, 5, padding=2),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(7),
        nn.Flatten(),
        nn.Linear(20 * 49, 32),
        nn.ReLU(),
    )
