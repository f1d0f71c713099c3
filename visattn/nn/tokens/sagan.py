"""Self-attention over feature maps (SAGAN)."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn._support.types import Variant
from visattn.nn.feature_maps import attend, grid, halved, tokens
from visattn.nn.shapes import bottleneck, check_maps


class SelfAttention2d(nn.Module):
    """Self-attention of SAGAN: each place takes from all places, by as much as a learned number lets it.

    `A_ji = softmax_i(g_j . f_i)`, `y_j = x_j + gamma v(sum_i A_ji h_i)` with 1 x 1 convolutions `f` (keys), `g` (queries), `h`
    (values) and `v` without biases. `gamma` starts at zero: the module changes nothing at first, and only `gamma` learns in the first
    step.

    Args:
        channels: C.
        reduction: Queries and keys have `C // reduction` channels, at least 1.
        width: Their channels, in the place of `reduction`.
        variant: `paper`: values have as many channels as keys. `official`: the authors' code, where values have half of C, and
            keys and values are the largest of each 2 x 2 places.

    Shape:
        `(B, C, H, W)` to the same; with `need_weights` also `A`, `(B, 1, H * W, N)`, (query, key), whose rows sum to 1; `N` is
        `H * W`, or `(H // 2) * (W // 2)` with `official`.

    Publishes:
        Nothing: no numbers are multiplied by `A`.

    Raises:
        OptionError: If a width is below 1 or the variant unknown.
        ShapeError: In the forward, if the input is not `(B, C, H, W)`, or a side of what is pooled is 1.

    Reference:
        Zhang et al., "Self-Attention Generative Adversarial Networks", ICML 2019, arXiv:1805.08318. Differs: their spectral norm of
        the convolutions is left to `torch.nn.utils.parametrizations.spectral_norm`. A widespread port has values of C channels and
        no `v`.
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
        """Add to each place what it attends to."""
        check_maps(self, x, self.channels)
        key, value = self.key(x), self.value(x)
        if self.variant == "official":
            key, value = halved(self, key), halved(self, value)
        mixed, weights = attend(tokens(self.query(x)), tokens(key), tokens(value), scale=1.0, need_weights=need_weights)
        y = x + self.gamma * self.output(grid(mixed, x))
        return y if weights is None else (y, weights)
