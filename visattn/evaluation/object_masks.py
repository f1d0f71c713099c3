"""Object masks on the grid of a map."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from visattn.core.geometry import Geometry
from visattn.core.maps import AttentionMap
from visattn.errors import MapError, ShapeError


class Cells(NamedTuple):
    """Cells of a map, with the photo pixels under each cell.

    Attributes:
        values: `(*axes, rows, columns)` values of the map.
        share: `(rows, columns)` share of each cell's pixels that belong to the object.
        area: `(rows, columns)` number of photo pixels whose center lies in the cell.
        covered: The object's share of all pixels that the model received.
    """

    values: NDArray[np.float64]
    share: NDArray[np.float64]
    area: NDArray[np.float64]
    covered: float


def cells_of(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> Cells:
    """Assign pixels to cells, as `to_heatmap` does with `nearest`, and count the object's share in each cell.

    A cell that contains no pixel center takes the mask value of the pixel under its own center. Cells outside the photo have share 0.

    Raises:
        ShapeError: If the mask is not a boolean mask of the photo's size.
        MapError: If the map has a batch axis or holes.
    """
    if mask.shape != geometry.photo or mask.dtype != np.bool_:
        raise ShapeError(f"the mask must be boolean and of the photo's size {geometry.photo}, got {mask.dtype} {mask.shape}.")
    refuse_holes(attention_map)
    if "batch" in attention_map.axes:
        raise MapError("a mask belongs to one photo, but the map has a batch axis. Choose one image: map.at(batch=0).")
    (down, heights), (across, widths) = (_along(attention_map, geometry, axis) for axis in (0, 1))
    counted = np.outer(down.sum(1), across.sum(1))  # also counts cells without a pixel of their own
    share, area = down @ mask @ across.T / np.maximum(counted, 1), np.outer(heights, widths)
    values = attention_map.values.detach().double().cpu().numpy()
    return Cells(values, share, area, float((share * area).sum() / max(area.sum(), 1)))


def refuse_holes(attention_map: AttentionMap) -> None:
    """Raise MapError if the map has holes, where there is no value to compare."""
    if holes := len(attention_map.layout.holes):
        raise MapError(f"{holes} of the map's cells are holes, where the model dropped tokens. Measure a map without holes.")


def partly(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> Cells:
    """Return `cells_of`, after checking that the object covers a part, but not all, of what the model received.

    Raises:
        ShapeError: If the mask is not a boolean mask of the photo's size.
        MapError: If the map has a batch axis or holes, or the object covers none or all of what the model received.
    """
    cells = cells_of(attention_map, mask, geometry)
    if not 0 < cells.covered < 1:
        raise MapError(f"the object must cover a part of what the model received, but it covers {cells.covered:.0%}.")
    return cells


def centers(attention_map: AttentionMap, geometry: Geometry, axis: int) -> NDArray[np.int64]:
    """Return the photo row (or column) under the center of each row (or column) of cells; it may lie outside the photo."""
    edges = _edges(attention_map, geometry, axis)
    return np.floor((edges[1:] + edges[:-1]) / 2 + 1e-9).astype(np.int64)


def _along(attention_map: AttentionMap, geometry: Geometry, axis: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return, along one axis, a 0/1 matrix `(cells, pixels)` of the pixels of each cell, and the number of centers in each cell."""
    pixels = np.arange(geometry.photo[axis])
    first = np.ceil(_edges(attention_map, geometry, axis) - 0.5 - 1e-9)  # as Geometry.seen rounds
    inside = (first[:-1, None] <= pixels) & (pixels < first[1:, None])
    count = inside.sum(1)
    inside |= (count == 0)[:, None] & (pixels == centers(attention_map, geometry, axis)[:, None])
    return inside.astype(np.float64), count.astype(np.float64)


def _edges(attention_map: AttentionMap, geometry: Geometry, axis: int) -> NDArray[np.float64]:
    """Return the edges of the cells along one axis, in photo pixels."""
    cells, box = attention_map.layout.grid[axis], geometry.box_to_photo(attention_map.layout.box)
    return box[axis] + np.arange(cells + 1) / cells * (box.height, box.width)[axis]
