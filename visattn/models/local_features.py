"""Small CNN with local features: each cell of its feature map has a receptive field of 20 x 20 pixels.

In a deep network the receptive field of every cell covers most of the image. A decoder can then find an object in any cell, so its
attention maps say little about where the object is. Here each cell describes only what lies there. After Brendel and Bethge, "Approximating
CNNs with Bag-of-local-Features models works surprisingly well on ImageNet", ICLR 2019, arXiv:1904.00760: few convolutions are larger than 1
x 1. Strided kernels have even sides, so the receptive field is centered on its cell.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

STRIDE, FIELD = 8, 20  # pixels


class LocalFeatures(nn.Module):
    """CNN with local features: image `(B, C, H, W)` to features `(B, width, H / 8, W / 8)`, or to class scores of their mean."""

    def __init__(self, *, width: int = 192, num_classes: int = 10, in_channels: int = 3) -> None:
        """Build with PyTorch's default initialization.

        Args:
            width: Number of channels of the features, a multiple of 4.
            num_classes: Number of classes; 0 to return the pooled features.
            in_channels: Number of input channels, C.
        """
        super().__init__()
        first, half = width // 4, width // 2
        self.features = nn.Sequential(
            *_layer(in_channels, first, 2, 2),  # receptive field 2 pixels
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
        """Compute the feature map, `(B, width, H / 8, W / 8)`."""
        features: Tensor = self.features(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Compute class scores, `(B, num_classes)`."""
        scores: Tensor = self.fc(self.forward_features(images).mean((2, 3)))
        return scores


class PixelMLP(nn.Module):
    """Residual block of two 1 x 1 convolutions with batch norms: `relu(x + W relu(W x))`."""

    def __init__(self, width: int) -> None:
        """Build both convolutions; the branch starts at 0."""
        super().__init__()
        norm = nn.BatchNorm2d(width)
        nn.init.zeros_(norm.weight)
        self.branch = nn.Sequential(*_layer(width, 2 * width, 1, 1), nn.Conv2d(2 * width, width, 1, bias=False), norm)

    def forward(self, maps: Tensor) -> Tensor:
        """Apply the block to `(B, width, H, W)`; the shape stays."""
        return torch.relu(maps + self.branch(maps))


def _layer(inputs: int, outputs: int, side: int, stride: int) -> list[nn.Module]:
    padding = (side - 1) // 2
    return [nn.Conv2d(inputs, outputs, side, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
