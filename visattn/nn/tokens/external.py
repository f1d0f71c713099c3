"""External attention."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from visattn._support.checks import at_least, one_of
from visattn._support.types import Variant
from visattn.nn.positions import grid, tokens, wide
from visattn.nn.shape_checks import check_maps, normed


class ExternalAttention(nn.Module):
    """External attention: positions attend to a few learned slots shared by all images; the cost is linear in the number of positions.

    `S = softmax_n(F M_k^T)` over positions; `A = S / (1e-9 + sum_s S)` over slots; `y = A M_v`. Through the softmax, each position depends
    on all others, so crop padding beforehand.

    Args:
        channels: Number of channels, C.
        slots: Number of rows of the two memories `M_k` and `M_v`.
        variant: `paper`: the formula alone. `official`: the authors' block around it, `relu(x + BN(conv(y)))` with `F = conv(x)`; both
            convolutions are 1 x 1.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`; with `need_weights` also `A`, `(B, 1, H * W, slots)`, (position, slot). Its rows sum to 1, up to
        the 1e-9.

    Publishes:
        Nothing: attention weights are not gates.

    Raises:
        OptionError: If a number is below 1 or the variant is unknown.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`, or if the batch norm in training mode gets one value per
            channel.

    Reference:
        Guo et al., "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks", TPAMI 2022, arXiv:2105.02358.
        Differs: the initialization is PyTorch's default. In the authors' code both memories initially share storage, until a copy separates
        them; here they are separate from the start.
    """

    def __init__(self, channels: int, *, slots: int = 64, variant: Variant = "paper") -> None:
        """Build with PyTorch's default initialization."""
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
        """Attend from each position to the slots."""
        check_maps(self, x, self.channels)
        framed = self.variant == "official"
        scores: Tensor = self.key(tokens(self.input(x) if framed else x))  # (B, 1, H * W, slots)
        weights = wide(scores).softmax(2)
        weights = weights / (1e-9 + weights.sum(3, keepdim=True))  # in float32: 1e-9 is 0 in float16
        y = grid(self.value(weights.to(scores.dtype)), x)  # (B, C, H, W)
        if framed:
            y = torch.relu(x + normed(self.norm, self.output(y)))
        return (y, weights) if need_weights else y
