"""Every module with an input: the cases of `test_every_module.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from visattn import nn as ours

Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]


def with_nonzero_parameters(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a module in evaluation mode with fixed parameters; those that start at zero would hide the rest."""
    torch.manual_seed(0)
    module = make().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return module


def maps(channels: int = 8, rows: int = 5, columns: int = 7, batch: int = 2) -> Callable[[], tuple[Tensor, ...]]:
    """Return a batch of feature maps with fixed values."""
    return lambda: (torch.randn(batch, channels, rows, columns, generator=torch.Generator().manual_seed(0)),)


GATES: dict[str, Case] = {
    "SE": (lambda: ours.SqueezeExcite(8), maps()),
    "CBAM": (lambda: ours.CBAM(8), maps()),
    "scSE": (lambda: ours.SCSE(8), maps()),
    "scSE add": (lambda: ours.SCSE(8, fusion="add"), maps()),
    "ECA": (lambda: ours.ECA(8), maps()),
    "BAM": (lambda: ours.BAM(8), maps()),
    "GE": (lambda: ours.GatherExcite(8), maps()),
    "GE of 2": (lambda: ours.GatherExcite(8, extent=2), maps()),
    "GE theta-plus of 4": (lambda: ours.GatherExcite(8, extent=4, variant="theta-plus"), maps()),
    "GE theta of all": (lambda: ours.GatherExcite(8, variant="theta", size=(5, 7)), maps()),
    "SK": (lambda: ours.SelectiveKernel(8), maps()),
    "coordinate": (lambda: ours.CoordinateAttention(8), maps()),
    "triplet": (lambda: ours.TripletAttention(8), maps()),
    "SimAM": (lambda: ours.SimAM(8), maps()),
    "attention gate": (lambda: ours.AttentionGate(8, gate_channels=6), lambda: maps()() + maps(6, 3, 4)()),
}


def both(*inputs: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """Combine several inputs for one module."""
    return lambda: tuple(x for made in inputs for x in made())


def rows_of(width: int, batch: int = 2) -> Callable[[], tuple[Tensor, ...]]:
    """Return a `(batch, width)` input with fixed values."""
    return lambda: (torch.randn(batch, width, generator=torch.Generator().manual_seed(1)),)


PLACES: dict[str, Case] = {
    "GC": (lambda: ours.GlobalContext(8), maps()),
    "GC scale": (lambda: ours.GlobalContext(8, fusion="scale"), maps()),
    "NL": (lambda: ours.NonLocal(8), maps()),
    "NL gaussian": (lambda: ours.NonLocal(8, variant="gaussian", scale="width"), maps()),
    "NL dot": (lambda: ours.NonLocal(8, variant="dot"), maps()),
    "NL concat": (lambda: ours.NonLocal(8, variant="concat"), maps()),
    "NL pooled, without norm": (lambda: ours.NonLocal(8, pool=True, norm=False), maps()),
    "SAGAN": (lambda: ours.SelfAttention2d(8), maps()),
    "SAGAN official": (lambda: ours.SelfAttention2d(8, variant="official"), maps()),
    "SASA": (lambda: ours.StandAloneSelfAttention(8, 12, kernel_size=3, num_heads=2), maps()),
    "augmented": (lambda: ours.AttentionAugmentedConv2d(8, 12, num_heads=2), maps()),
    "augmented with offsets": (lambda: ours.AttentionAugmentedConv2d(8, 12, num_heads=2, size=(6, 9)), maps()),
    "external": (lambda: ours.ExternalAttention(8, slots=6), maps()),
    "external official": (lambda: ours.ExternalAttention(8, slots=6, variant="official"), maps()),
    "STN": (lambda: ours.SpatialTransformer(8), maps()),
    "STN attention": (lambda: ours.SpatialTransformer(8, attention=True, size=(4, 6)), maps()),
    "retina": (lambda: ours.Retina(4, 2), both(maps(), rows_of(2))),
    "DRAW read": (lambda: ours.DrawRead(6, patch_size=3), both(maps(), rows_of(6))),
    "DRAW write": (lambda: ours.DrawWrite(8, 6, patch_size=3), both(maps(), rows_of(6))),
}


def tokens(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Return noise of the given shapes, with fixed seeds."""
    return lambda: tuple(torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes))


class OnGrid(nn.Module):
    """Wrapper that passes a fixed grid to a module with every call."""

    def __init__(self, module: nn.Module, *grid: int) -> None:
        super().__init__()
        self.module, self.grid = module, grid

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        out: Tensor | tuple[Tensor, ...] = self.module(*inputs, self.grid)
        return out


_GRID = tokens((2, 35, 8))  # a 5 x 7 grid
_PAIR = tokens((2, 3, 8), (2, 35, 8))
TOKENS: dict[str, Case] = {
    "multi-head": (lambda: ours.MultiHeadAttention(8, 2), _GRID),
    "multi-head cross": (lambda: ours.MultiHeadAttention(8, 2), _PAIR),
    "class attention": (lambda: ours.ClassAttention(8, 2), _GRID),
    "talking heads": (lambda: ours.TalkingHeadsAttention(8, 2), _GRID),
    "cross-covariance": (lambda: ours.CrossCovarianceAttention(8, 2), _GRID),
    "window": (lambda: OnGrid(ours.WindowAttention(8, 2, window_size=(5, 7)), 5, 7), _GRID),
    "window shifted": (lambda: OnGrid(ours.WindowAttention(8, 2, window_size=4, shift_size=2), 5, 7), _GRID),
    "sliding window": (lambda: OnGrid(ours.SlidingWindowAttention(8, 2, radius=1), 5, 7), _GRID),
    "sliding window with global tokens": (
        lambda: OnGrid(ours.SlidingWindowAttention(8, 2, radius=1, dilation=(1, 2), global_tokens=3), 4, 8),
        _GRID,
    ),
    "additive score": (lambda: ours.AdditiveScore(8, 6), tokens((2, 3, 8), (2, 35, 6))),
    "dot score": (lambda: ours.DotScore(), _PAIR),
    "scaled dot score": (lambda: ours.ScaledDotScore(), _PAIR),
    "general score": (lambda: ours.GeneralScore(8, 6), tokens((2, 3, 8), (2, 35, 6))),
    "cosine score": (lambda: ours.CosineScore(3.0, learned=True), _PAIR),
    "content and location": (lambda: OnGrid(ours.ContentLocationAddressing(8, 8), 35), _PAIR),
    "content and location on a grid": (lambda: OnGrid(ours.ContentLocationAddressing(8, 8, axes=2), 5, 7), _PAIR),
    "location score": (lambda: ours.LocationScore(8, 35), _PAIR),
    "local-m": (lambda: OnGrid(ours.LocalMonotonic(1), 5, 7), tokens((2, 35, 35), (2, 35, 8))),
    "local-p": (lambda: OnGrid(ours.LocalPredictive(8, 2), 5, 7), tokens((2, 3, 8), (2, 3, 35), (2, 35, 8))),
    "local-p of a sequence": (
        lambda: OnGrid(ours.LocalPredictive(8, 2, axes=1, renormalize=True), 35),
        tokens((2, 3, 8), (2, 3, 35), (2, 35, 8)),
    ),
    "soft attention": (lambda: ours.SoftAttention(8, 6), tokens((2, 35, 8), (2, 6))),
    "hard attention": (lambda: ours.HardAttention(8, 6), tokens((2, 35, 8), (2, 6))),
    "hard attention, argmax": (lambda: ours.HardAttention(8, 6, eval_mode="argmax"), tokens((2, 35, 8), (2, 6))),
}
