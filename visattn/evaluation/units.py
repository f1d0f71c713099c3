"""Parts of a model's input that are removed or kept together, pixels or cells of a map, in the order of the map."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visattn._support.checks import at_least, one_of
from visattn._support.reprs import in_pixels
from visattn.core.geometry import Box, Geometry
from visattn.core.maps.interpolation import resampled
from visattn.errors import MapError, ShapeError
from visattn.evaluation.choices import By
from visattn.evaluation.given import ARRAY, MapLike, one_map
from visattn.evaluation.object_masks import refuse_holes

_DIGITS = 12  # of interpolated values, relative to the largest


@dataclass(frozen=True, eq=False)
class Units:
    """Parts of an input, each with a value.

    Attributes:
        index: `(height, width)` number of the unit that each pixel belongs to; -1 if the map does not cover it.
        values: `(units,)` values of the map.
        seed: Seed of the order of units with equal values.
    """

    index: NDArray[np.int64]
    values: NDArray[np.float64]
    seed: int = 0

    def __len__(self) -> int:
        """Return the number of units."""
        return len(self.values)

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Units from the largest value to the smallest; equal ones in random order."""
        shuffled = np.random.default_rng(self.seed).permutation(len(self))
        return shuffled[np.argsort(-self.values[shuffled], kind="stable")]

    def reversed(self) -> Units:
        """Return the same units with negated values: the smallest comes first."""
        return replace(self, values=-self.values)

    def ranks(self, device: torch.device) -> Tensor:
        """Return the place of each pixel's unit in the order, from 0; the number of units for pixels without one: `(height, width)`."""
        ranks = np.full(len(self) + 1, len(self), np.int32)
        ranks[self.order] = np.arange(len(self))
        return torch.from_numpy(ranks[self.index]).to(device)

    def among(self, chosen: NDArray[np.bool_], device: torch.device) -> Tensor:
        """Return the pixels of chosen units, `(sets, units)`: booleans `(sets, 1, height, width)`."""
        padded = np.pad(chosen, ((0, 0), (0, 1)))  # the last one stands for pixels without a unit
        return torch.from_numpy(padded[:, self.index])[:, None].to(device)


def units_of(shown: MapLike, size: tuple[int, int], by: By, seed: int = 0) -> Units:
    """Return the units of a map on a model's input.

    Args:
        shown: Map of one image without further axes; an explanation; or an array `(rows, columns)` over the whole input.
        size: Size of the input, `(height, width)`.
        by: `pixels`, with values that are interpolated between the centers of cells (bilinear); or `cells`, which stay whole.
        seed: Seed of the order of units with equal values.

    Raises:
        MapError: If the map has other axes or holes, or was made for another input.
        OptionError: If `by` is unknown.
        ShapeError: If an array has other axes.
    """
    one_of(by, get_args(By), "unit")
    at_least("seed", seed, 0)
    found = one_map(shown)
    if found.axes or len(found.layout.grid) != 2:
        raise MapError(f"a metric takes one map, (rows, columns); this one has the axes {(*found.axes, *found.layout.grid)}.")
    refuse_holes(found)
    box, made = found.layout.box, found.facts.input_size
    if found.layout.space == ARRAY:
        box = Box(0, 0, *size)
        if any(cells > pixels for cells, pixels in zip(found.layout.grid, size, strict=True)):
            raise MapError(
                f"the map has {in_pixels(found.layout.grid)} cells, more than the input has pixels, {in_pixels(size)}. "
                "Pass a map of the model's input, not of the whole photo."
            )
    elif made not in (None, size) or box.bottom > size[0] or box.right > size[1]:
        raise MapError(
            f"the map was made for {in_pixels(made or (box.bottom, box.right))} input pixels, these are {in_pixels(size)}."
        )
    whole = Geometry(size, size, Box(0, 0, *size))
    top, left, bottom, right = (int(side) for side in whole.seen(box))
    grid = found.values.detach().double().cpu().numpy()
    if bottom <= top or right <= left:
        raise ShapeError(f"the map covers none of the {in_pixels(size)} pixels.")
    cells = np.arange(grid.size, dtype=np.float64).reshape(grid.shape)
    index = np.full(size, -1)
    if by == "cells":
        inside = resampled(cells.astype(np.float32), whole, box, whole.seen(box), "nearest").round().astype(np.int64)
        index[top:bottom, left:right] = inside
        held = np.unique(inside)  # cells without a pixel are left out
        index[index >= 0] = np.searchsorted(held, index[index >= 0])
        return Units(index, grid.ravel()[held], seed)
    values = grid if grid.shape == (bottom - top, right - left) else _interpolated(grid, box, whole.seen(box))
    index[top:bottom, left:right] = np.arange(values.size).reshape(values.shape)
    return Units(index, values.ravel(), seed)


def _interpolated(grid: NDArray[np.float64], box: Box, seen: Box) -> NDArray[np.float64]:
    """Return values at the pixels, rounded so that the rounding of the interpolation does not rank equal ones."""
    scale = np.abs(grid).max() or 1.0
    down = _weights(grid.shape[0], box.top, box.height, range(int(seen.top), int(seen.bottom)))
    across = _weights(grid.shape[1], box.left, box.width, range(int(seen.left), int(seen.right)))
    values: NDArray[np.float64] = (down @ (grid / scale) @ across.T).round(_DIGITS) * scale
    return values


def _weights(cells: int, start: float, extent: float, pixels: range) -> NDArray[np.float64]:
    """Return the weight of each cell for each pixel along a side, `(pixels, cells)`: linear between the centers of cells."""
    centers = start + (np.arange(cells) + 0.5) * extent / cells
    return np.stack([np.interp(np.array(pixels) + 0.5, centers, one) for one in np.eye(cells)], 1)
