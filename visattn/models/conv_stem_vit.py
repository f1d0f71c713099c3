"""Small vision transformer with a convolutional stem: it learns from thousands of images, not millions.

Xiao et al., "Early Convolutions Help Transformers See Better", NeurIPS 2021, arXiv:2106.14881: a stack of 3x3 convolutions replaces the
single strided convolution of the patch embedding, with the same total stride. The blocks are timm's, so visattn supports them as any timm
vision transformer. Differs from the paper: patches are 8 pixels wide, the last 3x3 convolution outputs the tokens directly, and the
classifier head uses the mean of all patch tokens (no class token).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

PATCH = 8


class EarlyConvolutions(PatchEmbed):  # type: ignore[misc] # timm's types are partial
    """Convolutional stem: image `(B, C, H, W)` to tokens `(B, H / 8 * W / 8, dim)`, each with a receptive field of 27 x 27 pixels."""

    def __init__(self, *, in_chans: int = 3, embed_dim: int = 96, **options: Any) -> None:  # noqa: ANN401
        """Build as timm's `PatchEmbed`, which gets `options`."""
        super().__init__(in_chans=in_chans, embed_dim=embed_dim, **options)
        widths = (in_chans, embed_dim // 4, embed_dim // 4, embed_dim // 2, embed_dim // 2, embed_dim)
        layers: list[nn.Module] = []
        for (inputs, outputs), stride in zip(pairwise(widths), (2, 1, 2, 1, 2), strict=True):
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.proj = nn.Sequential(*layers[:-1])  # no last ReLU: the norms of the blocks follow


def vit_c(
    *,
    img_size: int | tuple[int, int] = 64,
    embed_dim: int = 96,
    depth: int = 4,
    num_heads: int = 4,
    mlp_ratio: float = 2.0,
    num_classes: int = 10,
    in_chans: int = 3,
) -> VisionTransformer:
    """Build a ViT_C for images of a fixed size; it has 0.39 M parameters with ten classes.

    Args:
        img_size: Side or `(height, width)` of the images in pixels, multiples of 8.
        embed_dim: Width of a token.
        depth: Number of blocks.
        num_heads: Number of attention heads, a divisor of `embed_dim`.
        mlp_ratio: Ratio of the hidden width of a block's MLP to `embed_dim`.
        num_classes: Number of classes.
        in_chans: Number of input channels, C.
    """
    return VisionTransformer(
        img_size=img_size,
        patch_size=PATCH,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        mlp_ratio=mlp_ratio,
        num_classes=num_classes,
        in_chans=in_chans,
        class_token=False,
        global_pool="avg",
        embed_layer=EarlyConvolutions,
    )
