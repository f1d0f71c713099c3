"""External attention."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn._support.types import Variant
from visattn.nn.feature_maps import grid, tokens, wide
from visattn.nn.shapes import at_least, check_maps, normed


class ExternalAttention(nn.Module):
    """External attention: places attend to a few learned slots that all images share, at a cost linear in the places.

    `S = softmax_n(F M_k^T)`, over places; `A = S / (1e-9 + sum_s S)`, over slots; `y = A M_v`. Each place depends on all others
    through the softmax, so padded places must be cut off before.

    Args:
        channels: C.
        slots: Rows of the two memories.
        variant: `paper`: the formula alone. `official`: the authors' block around it,
            `relu(x + BN(conv(y)))` with `F = conv(x)`, both 1 x 1.

    Shape:
        `(B, C, H, W)` to the same; with `need_weights` also `A`, `(B, 1, H * W, slots)`, (place, slot), whose rows sum to 1 but for
        the 1e-9.

    Publishes:
        Nothing: no numbers are multiplied by `A`.

    Raises:
        OptionError: If a number is below 1 or the variant unknown.
        ShapeError: In the forward, if the input is not `(B, C, H, W)`, or the norm trains on a single value.

    Reference:
        Guo et al., "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks", TPAMI 2022,
        arXiv:2105.02358. Differs: initial values are PyTorch's. The authors' code starts both memories with shared storage, which
        any copy unties; here they are two from the start.
    """

    def __init__(self, channels: int, *, slots: int = 64, variant: Variant = "paper") -> None:
        """Build with PyTorch's initial values of a convolution and a linear layer."""
        super().__init__()
        one_of(variant, get_args(Variant), "variant of ExternalAttention")
        self.channels, self.variant = at_least("channels", channels), variant
        self.key = nn.Linear(channels, at_least("slots", slots), bias=False)
        self.value = nn.Linear(slots, channels, bias=False)
        if variant == "official":
            self.input = nn.Conv2d(channels, channels, 1)
            self.output = nn.Conv2d(channels, channels, 1, bias=False)
            self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each place to the slots."""
        check_maps(self, x, self.channels)
        framed = self.variant == "official"
        scores: Tensor = self.key(tokens(self.input(x) if framed else x))  # (B, 1, H * W, slots)
        weights = wide(scores).softmax(2)
        weights = weights / (1e-9 + weights.sum(3, keepdim=True))  # in float16, 1e-9 is 0
        y = grid(self.value(weights.to(scores.dtype)), x)
        if framed:
            y = torch.relu(x + normed(self.norm, self.output(y)))
        return (y, weights) if need_weights else y
