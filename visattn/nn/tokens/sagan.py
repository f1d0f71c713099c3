"""Self-attention over feature maps (SAGAN)."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn._support.types import Variant
from visattn.nn.positions import attend, grid, halved, tokens
from visattn.nn.shape_checks import bottleneck, check_maps


class SelfAttention2d(nn.Module):
    """Self-attention of SAGAN: each position attends to all positions, and a learned scalar scales what is added.

    `A_ji = softmax_i(g_j . f_i)`, `y_j = x_j + gamma v(sum_i A_ji h_i)` with 1 x 1 convolutions `f` (keys), `g` (queries), `h` (values) and
    `v`, all without bias. `gamma` starts at zero: the module starts as the identity, and in the first step only `gamma` gets a gradient.

    Args:
        channels: Number of channels, C.
        reduction: Reduction ratio. Queries and keys have `C // reduction` channels, at least 1.
        width: Number of channels of queries and keys; overrides `reduction`.
        variant: `paper`: values have as many channels as keys. `official`: as in the authors' code, values have C / 2 channels, and 2 x 2
            max pooling is applied to keys and values.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`; with `need_weights` also `A`, `(B, 1, H * W, N)`, (query, key), whose rows sum to 1. `N` is
        `H * W`, or `(H // 2) * (W // 2)` with `official`.

    Publishes:
        Nothing: attention weights are not gates.

    Raises:
        OptionError: If a width is below 1 or the variant is unknown.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`, or if a map to be pooled has a side of 1.

    Reference:
        Zhang et al., "Self-Attention Generative Adversarial Networks", ICML 2019, arXiv:1805.08318. Differs: the convolutions have no
        spectral norm; add it with `torch.nn.utils.parametrizations.spectral_norm`. A widespread port has values with C channels and no `v`.
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 8,
        *,
        width: int | None = None,
        variant: Variant = "paper",
    ) -> None:
        """Build as the identity."""
        super().__init__()
        one_of(variant, get_args(Variant), "variant of SelfAttention2d")
        width = bottleneck(channels, reduction, width)
        values = width if variant == "paper" else max(1, channels // 2)
        self.channels, self.variant = channels, variant
        self.query = nn.Conv2d(channels, width, 1, bias=False)
        self.key = nn.Conv2d(channels, width, 1, bias=False)
        self.value = nn.Conv2d(channels, values, 1, bias=False)
        self.output = nn.Conv2d(values, channels, 1, bias=False)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Add the attention output to each position."""
        check_maps(self, x, self.channels)
        key, value = self.key(x), self.value(x)
        if self.variant == "official":
            key, value = halved(self, key), halved(self, value)
        mixed, weights = attend(tokens(self.query(x)), tokens(key), tokens(value), scale=1.0, need_weights=need_weights)
        y = x + self.gamma * self.output(grid(mixed, x))  # (B, C, H, W)
        return y if weights is None else (y, weights)
