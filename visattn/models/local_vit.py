"""Small vision transformers with local attention: sliding windows that grow with depth, or windows around predicted positions.

Beltagy et al., "Longformer", 2020, arXiv:2004.05150, uses small windows in lower layers and larger ones in higher layers; Zhang et al.,
"Multi-Scale Vision Longformer", ICCV 2021, arXiv:2103.15358, on images. Luong et al., EMNLP 2015, arXiv:1508.04025, predicts the center of
each window. Stem, head and widths are those of `visattn.models.vit_c` with patches of 4 pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn.errors import OptionError
from visattn.nn import LocalPredictive, SlidingWindowAttention

PATCH = 4
RADII = 1, 2, 3, 5  # of the windows in each block, in cells
PREDICTED_RADII = 6, 6, 6, 6  # the first windows lie in the middle of the image; small ones miss most objects and hardly learn


class LocalViT(nn.Module):
    """Vision transformer with local attention: image `(B, C, H, W)` to class scores `(B, num_classes)` of the mean of its tokens.

    Each block is `x + attention(norm(x))`, then `x + mlp(norm(x))`. The tokens lie on a grid of cells of 4 x 4 pixels.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 64,
        predicted: bool = False,
        radii: Sequence[int] = RADII,
        embed_dim: int = 96,
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        num_classes: int = 10,
        in_channels: int = 3,
    ) -> None:
        """Build with PyTorch's default initialization.

        Args:
            img_size: Side or `(height, width)` of the images in pixels, multiples of 4.
            predicted: Whether each token predicts the center of its window. Otherwise the window lies around the token itself.
            radii: Half width of the windows in each block, in cells; their number is the depth.
            embed_dim: Width of a token, a multiple of 4.
            num_heads: Number of attention heads, a divisor of `embed_dim`. Predicted windows have one head.
            mlp_ratio: Ratio of the hidden width of a block's MLP to `embed_dim`.
            num_classes: Number of classes.
            in_channels: Number of input channels, C.

        Raises:
            OptionError: If the patches do not cover the images, `embed_dim` is not a multiple of 4 and of `num_heads`, or a number is
                below 1.
        """
        super().__init__()
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        if height % PATCH or width % PATCH:
            raise OptionError(f"img_size must be a multiple of {PATCH}, got {height} x {width}.")
        if embed_dim % 4 or embed_dim < 4:
            raise OptionError(f"embed_dim must be a multiple of 4, got {embed_dim}.")
        for name, number in (("num_classes", num_classes), ("in_channels", in_channels), ("number of radii", len(radii))):
            at_least(name, number)
        self.grid = at_least("height", height // PATCH), at_least("width", width // PATCH)
        self.stem = nn.Sequential(*_stem(in_channels, embed_dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, self.grid[0] * self.grid[1], embed_dim))
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, radius, int(embed_dim * mlp_ratio), predicted=predicted) for radius in radii
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute class scores."""
        x = self.stem(images).flatten(2).mT + self.pos_embed  # (B, N, dim)
        for block in self.blocks:
            x = block(x, self.grid)
        scores: Tensor = self.head(self.norm(x).mean(1))
        return scores


class Block(nn.Module):
    """Transformer block with local attention."""

    def __init__(self, embed_dim: int, num_heads: int, radius: int, hidden: int, *, predicted: bool) -> None:
        """Build the block."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.attn = (
            PredictedWindows(embed_dim, radius) if predicted else SlidingWindowAttention(embed_dim, num_heads, radius=radius)
        )
        self.mlp = nn.Sequential(nn.Linear(embed_dim, hidden), nn.GELU(), nn.Linear(hidden, embed_dim))

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the new tokens, `(B, N, dim)`."""
        x = x + self.attn(self.norm1(x), grid)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class PredictedWindows(nn.Module):
    """Self-attention with one head, in windows whose centers the queries predict; the weights sum to 1."""

    def __init__(self, embed_dim: int, radius: int) -> None:
        """Build the projections."""
        super().__init__()
        self.qkv, self.proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)
        self.near = LocalPredictive(embed_dim, radius, renormalize=True)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the new tokens, `(B, N, dim)`."""
        query, key, value = self.qkv(x).chunk(3, 2)
        scores = query @ key.mT * query.shape[2] ** -0.5  # (B, N, N)
        out, _ = self.near(query, scores, value, grid)
        return self.proj(out)  # type: ignore[no-any-return]


def sliding_vit(*, img_size: int | tuple[int, int] = 64, num_classes: int = 10, in_chans: int = 3) -> LocalViT:
    """Build a `LocalViT` whose windows lie around each token and grow with depth: 3, 5, 7, then 11 cells wide."""
    return LocalViT(img_size=img_size, num_classes=num_classes, in_channels=in_chans)


def predictive_vit(*, img_size: int | tuple[int, int] = 64, num_classes: int = 10, in_chans: int = 3) -> LocalViT:
    """Build a `LocalViT` whose tokens predict where to attend, in windows 13 cells wide."""
    return LocalViT(img_size=img_size, predicted=True, radii=PREDICTED_RADII, num_classes=num_classes, in_channels=in_chans)


def _stem(in_channels: int, embed_dim: int) -> list[nn.Module]:
    """Build convolutions with a total stride of 4, and no activation behind the last, as the norms of the blocks follow."""
    layers: list[nn.Module] = []
    widths = in_channels, embed_dim // 4, embed_dim // 4, embed_dim // 2, embed_dim
    for (inputs, outputs), stride in zip(pairwise(widths), (2, 1, 2, 1), strict=True):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return layers[:-1]
