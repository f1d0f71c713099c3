"""Masks of objects on the grid of a map."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from visattn.errors import MapError, ShapeError
from visattn.geometry import Geometry
from visattn.maps import AttentionMap


class Cells(NamedTuple):
    """A map's cells, and what lies under each.

    Attributes:
        values: `(*axes, rows, columns)`, the map's.
        share: `(rows, columns)`, the object's share of the cell's pixels.
        area: `(rows, columns)`, how many pixels of the photo have their center in the cell.
        covered: The object's share of all pixels that the model saw.
    """

    values: NDArray[np.float64]
    share: NDArray[np.float64]
    area: NDArray[np.float64]
    covered: float


def cells_of(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> Cells:
    """The pixels under each cell, as `to_heatmap` gives them to cells under `nearest`.

    A cell so small that it holds no pixel's center has the share of the pixel under its own; one outside the photo has 0.

    Raises:
        ShapeError: If the mask is no boolean mask of the photo's size.
        MapError: If the map is of several photos, or has holes.
    """
    if mask.shape != geometry.photo or mask.dtype != np.bool_:
        raise ShapeError(f"the mask must be boolean and of the photo's size {geometry.photo}, got {mask.dtype} {mask.shape}.")
    refuse_holes(attention_map)
    if "batch" in attention_map.axes:
        raise MapError("a mask is of one photo, the map of a batch. Choose one image: map.at(batch=0).")
    (down, heights), (across, widths) = (_along(attention_map, geometry, axis) for axis in (0, 1))
    counted = np.outer(down.sum(1), across.sum(1))  # also for cells without a pixel of their own
    share, area = down @ mask @ across.T / np.maximum(counted, 1), np.outer(heights, widths)
    values = attention_map.values.detach().double().cpu().numpy()
    return Cells(values, share, area, float((share * area).sum() / max(area.sum(), 1)))


def refuse_holes(attention_map: AttentionMap) -> None:
    """Raise MapError for a map that has no values where the model dropped tokens: there is nothing to compare there."""
    if holes := len(attention_map.layout.holes):
        raise MapError(f"{holes} of the map's cells are holes, where the model dropped tokens. Measure a map without holes.")


def partly(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> Cells:
    """The same where the question needs an object and something that is none.

    Raises:
        ShapeError: If the mask is no boolean mask of the photo's size.
        MapError: If the map is of several photos, or nothing of the object or everything that the model saw is object.
    """
    cells = cells_of(attention_map, mask, geometry)
    if not 0 < cells.covered < 1:
        raise MapError(f"the object must cover a part of what the model saw, it covers {cells.covered:.0%}.")
    return cells


def centers(attention_map: AttentionMap, geometry: Geometry, axis: int) -> NDArray[np.int64]:
    """The row (or column) of photo pixels under the center of each row (or column) of cells; it may lie outside the photo."""
    edges = _edges(attention_map, geometry, axis)
    return np.floor((edges[1:] + edges[:-1]) / 2 + 1e-9).astype(np.int64)


def _along(attention_map: AttentionMap, geometry: Geometry, axis: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Along one axis: 1 where a cell's share is of this pixel, `(cells, pixels)`, and how many pixels are its own."""
    pixels = np.arange(geometry.photo[axis])
    first = np.ceil(_edges(attention_map, geometry, axis) - 0.5 - 1e-9)  # as Geometry.seen rounds
    inside = (first[:-1, None] <= pixels) & (pixels < first[1:, None])
    count = inside.sum(1)
    inside |= (count == 0)[:, None] & (pixels == centers(attention_map, geometry, axis)[:, None])
    return inside.astype(np.float64), count.astype(np.float64)


def _edges(attention_map: AttentionMap, geometry: Geometry, axis: int) -> NDArray[np.float64]:
    """Where cells begin and end along one axis, in photo pixels."""
    cells, box = attention_map.layout.grid[axis], geometry.box_to_photo(attention_map.layout.box)
    return box[axis] + np.arange(cells + 1) / cells * (box.height, box.width)[axis]
