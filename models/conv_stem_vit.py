"""A small vision transformer whose patches come from a few convolutions: it learns from thousands of pictures, not millions.

Xiao et al., "Early Convolutions Help Transformers See Better", NeurIPS 2021, arXiv:2106.14881: the one strided convolution that cuts a
picture into patches is replaced by a stack of 3x3 convolutions with the same stride in all. The blocks are timm's, so all that is known of
its vision transformers holds here. Differs from the paper: a patch is 8 pixels wide, the last 3x3 convolution gives the tokens itself,
and the class reads the mean of all patches (no class token).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

PATCH = 8


class EarlyConvolutions(PatchEmbed):  # type: ignore[misc] # timm's types are partial
    """Picture `(B, C, H, W)` to tokens `(B, H / 8 * W / 8, dim)`; each sees 27 x 27 pixels."""

    def __init__(self, *, in_chans: int = 3, embed_dim: int = 96, **options: Any) -> None:  # noqa: ANN401
        """As timm builds its own; `options` go to it."""
        super().__init__(in_chans=in_chans, embed_dim=embed_dim, **options)
        widths = (in_chans, embed_dim // 4, embed_dim // 4, embed_dim // 2, embed_dim // 2, embed_dim)
        layers: list[nn.Module] = []
        for (inputs, outputs), stride in zip(pairwise(widths), (2, 1, 2, 1, 2), strict=True):
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.proj = nn.Sequential(*layers[:-1])  # the blocks' own norms follow


def vit_c(
    *,
    img_size: int | tuple[int, int] = 64,
    dim: int = 96,
    depth: int = 4,
    heads: int = 4,
    mlp_ratio: float = 2.0,
    num_classes: int = 10,
    in_chans: int = 3,
) -> VisionTransformer:
    """Image of one size to class scores; 0.39 M parameters with ten classes.

    Args:
        img_size: Side or `(height, width)` in pixels, multiples of 8.
        dim: Width of a token.
        depth: Number of blocks.
        heads: Attention heads; they divide `dim`.
        mlp_ratio: Width of the hidden layer of a block, in `dim`.
        num_classes: Length of the output.
        in_chans: C.
    """
    return VisionTransformer(
        img_size=img_size,
        patch_size=PATCH,
        embed_dim=dim,
        depth=depth,
        num_heads=heads,
        mlp_ratio=mlp_ratio,
        num_classes=num_classes,
        in_chans=in_chans,
        class_token=False,
        global_pool="avg",
        embed_layer=EarlyConvolutions,
    )
