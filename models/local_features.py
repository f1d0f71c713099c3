"""A small CNN whose features are local: each place of its map knows 20 x 20 pixels and nothing else.

In a deep network the receptive field of every place is most of the picture, so a decoder can read an object wherever it looks, and a map
of where it looked says little. Here what a place tells is of what lies there. After Brendel and Bethge, "Approximating CNNs with
Bag-of-local-Features models works surprisingly well on ImageNet", ICLR 2019, arXiv:1904.00760: few convolutions wider than a pixel, the
rest 1 x 1. Strided kernels have even sides, so that the middle of what a place sees is the middle of its cell.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

STRIDE, FIELD = 8, 20  # pixels


class LocalFeatures(nn.Module):
    """Image `(B, C, H, W)` to features `(B, width, H / 8, W / 8)`, or to class scores of their mean."""

    def __init__(self, *, width: int = 192, num_classes: int = 10, in_channels: int = 3) -> None:
        """Build with PyTorch's initial values.

        Args:
            width: Channels of the features, a multiple of 4.
            num_classes: Length of the output; 0 for the pooled features.
            in_channels: C.
        """
        super().__init__()
        first, half = width // 4, width // 2
        self.features = nn.Sequential(
            *_layer(in_channels, first, 2, 2),  # sees 2 pixels
            *_layer(first, first, 3, 1),  # 6
            *_layer(first, half, 2, 2),  # 8
            *_layer(half, half, 3, 1),  # 16
            *_layer(half, width, 2, 2),  # 20
            PixelMLP(width),
            PixelMLP(width),
        )
        self.num_features = width
        self.fc = nn.Linear(width, num_classes) if num_classes else nn.Identity()

    def forward_features(self, images: Tensor) -> Tensor:
        """The map."""
        features: Tensor = self.features(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.fc(self.forward_features(images).mean((2, 3)))
        return scores


class PixelMLP(nn.Module):
    """A residual branch of two 1 x 1 convolutions: `x + W relu(W x)`, with batch norms."""

    def __init__(self, width: int) -> None:
        """Build both; the branch starts at 0."""
        super().__init__()
        norm = nn.BatchNorm2d(width)
        nn.init.zeros_(norm.weight)
        self.branch = nn.Sequential(*_layer(width, 2 * width, 1, 1), nn.Conv2d(2 * width, width, 1, bias=False), norm)

    def forward(self, maps: Tensor) -> Tensor:
        """The shape stays."""
        return torch.relu(maps + self.branch(maps))


def _layer(inputs: int, outputs: int, side: int, stride: int) -> list[nn.Module]:
    padding = (side - 1) // 2
    return [nn.Conv2d(inputs, outputs, side, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
