"""Whether a map stays where it is when the input changes a little, and moves with what it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from visattn._support.checks import at_least, between
from visattn._support.reprs import brief
from visattn.errors import MapError
from visattn.evaluation.given import MapLike
from visattn.evaluation.randomization import cells_of_map, spearman
from visattn.evaluation.scores import one_input

Array = NDArray[np.float64]
Explain = Callable[[Tensor], MapLike]


@dataclass(frozen=True, eq=False)
class Robustness:
    """Spearman correlations of a map with that of a changed input, moved back.

    They are NaN if one of both is constant, or if fewer than two cells are left to compare.

    Attributes:
        noise: `(samples,)` with Gaussian noise on the input.
        shift: `(4,)` with the input moved by one cell down, up, right and left, on the cells that both show.
        flip: With the input mirrored left to right.
        brightness: `(2,)` with the input made brighter, and darker.
        patch: `(samples,)` with a square of noise somewhere, on the cells outside of it.
    """

    noise: Array
    shift: Array
    flip: float
    brightness: Array
    patch: Array

    __repr__ = brief


def robustness(
    explain: Explain,
    pixels: Tensor,
    *,
    noise: float = 0.1,
    brightness: float = 0.2,
    patch: float = 0.25,
    samples: int = 5,
    seed: int = 0,
) -> Robustness:
    """Compare the map of an input with the maps of slightly changed inputs.

    A map that ignores the input is as robust as can be: these numbers say that a map is stable, not that it is right.

    Args:
        explain: Function from one input `(1, C, H, W)` to its map, always of the same class.
        pixels: One preprocessed input, `(C, H, W)` or `(1, C, H, W)`.
        noise: Standard deviation of the noise, in units of the standard deviation of the input.
        brightness: What is added to, and subtracted from all numbers, in the same unit.
        patch: Side of the pasted square, as a share of the input's sides, above 0 and at most a half.
        samples: Number of inputs with noise, and with a pasted square.
        seed: Seed of both.

    Returns:
        The correlations.

    Raises:
        OptionError: If a number is out of range.
        ShapeError: If maps differ in their grids, or the input has another shape.
        MapError: If the map has fewer than two rows or columns.
    """
    between(noise, 0, 100, "noise")
    between(brightness, 0, 100, "brightness")
    between(patch, 1e-6, 0.5, "patch")
    at_least("samples", samples)
    pixels, generator = one_input(pixels), torch.Generator().manual_seed(seed)
    own, unit = cells_of_map(explain(pixels)), float(pixels.std())
    if min(own.shape) < 2:
        raise MapError(f"a map of at least two rows and columns is needed, got {own.shape}.")

    def of(changed: Tensor) -> Array:
        return cells_of_map(explain(changed))

    def drawn() -> Tensor:
        return torch.randn(pixels.shape, generator=generator).to(pixels)

    noisy = [spearman(own, of(pixels + noise * unit * drawn())) for _ in range(samples)]
    bright = [spearman(own, of(pixels + sign * brightness * unit)) for sign in (1, -1)]
    pasted = [_pasted(own, of, pixels, drawn() * unit + pixels.mean(), patch, generator) for _ in range(samples)]
    shifted = [_shifted(own, of, pixels, down, across) for down, across in ((1, 0), (-1, 0), (0, 1), (0, -1))]
    flipped = spearman(own[:, ::-1], of(pixels.flip(-1)))
    return Robustness(np.array(noisy), np.array(shifted), flipped, np.array(bright), np.array(pasted))


def _shifted(own: Array, of: Callable[[Tensor], Array], pixels: Tensor, down: int, across: int) -> float:
    """Move the input by a cell, with its edge repeated, and compare the cells that both maps show."""
    height, width = pixels.shape[-2:]
    rows, columns = round(height / own.shape[0]), round(width / own.shape[1])
    padded = F.pad(pixels, (columns, columns, rows, rows), "replicate")
    top, left = rows * (1 - down), columns * (1 - across)
    moved = of(padded[..., top : top + height, left : left + width])
    return spearman(_without_edge(own, -down, -across), _without_edge(moved, down, across))


def _without_edge(cells: Array, down: int, across: int) -> Array:
    """Return the cells without the first row (1), or the last (-1), and so for columns."""
    rows, columns = (slice(max(step, 0), count + min(step, 0)) for step, count in zip((down, across), cells.shape, strict=True))
    return cells[rows, columns]


def _pasted(
    own: Array, of: Callable[[Tensor], Array], pixels: Tensor, content: Tensor, share: float, generator: torch.Generator
) -> float:
    """Paste a square of other content somewhere, and compare the cells that it does not touch."""
    height, width = pixels.shape[-2:]
    sides = [max(1, round(share * side)) for side in (height, width)]
    top, left = (
        int(torch.randint(side - size + 1, (), generator=generator)) for side, size in zip((height, width), sides, strict=True)
    )
    is_inside = torch.zeros(height, width, dtype=torch.bool)
    is_inside[top : top + sides[0], left : left + sides[1]] = True
    changed = of(torch.where(is_inside.to(pixels.device), content, pixels))
    touched = F.adaptive_max_pool2d(is_inside[None].float(), own.shape)[0].bool().numpy()
    return spearman(own[~touched], changed[~touched])
