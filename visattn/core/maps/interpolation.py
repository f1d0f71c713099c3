"""Interpolation from grid cells to photo pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from visattn._support.checks import one_of
from visattn._support.reprs import in_pixels
from visattn._support.types import Interpolation
from visattn.core.geometry import Box, Geometry
from visattn.core.maps.heatmaps import Heatmap
from visattn.errors import MapError

__all__ = ["resampled"]

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LEAST = 1e-3  # least total weight of the cells around a pixel beside a hole


def heatmap_of(source: Any, geometry: Geometry, interpolation: Interpolation) -> Heatmap:  # noqa: ANN401 - its class imports this file
    """Interpolate an `AttentionMap` to the photo's own pixels; see `AttentionMap.to_heatmap`."""
    one_of(interpolation, tuple(KERNELS), "interpolation")
    _check_fit(source, geometry)
    box, (rows, columns) = source.layout.box, source.layout.grid
    grid, seen = source.values.detach().float().cpu().numpy(), geometry.seen(box)
    top, left, bottom, right = (int(side) for side in seen)
    values = np.zeros((*grid.shape[:-2], *geometry.photo), np.float32)
    values[..., top:bottom, left:right] = resampled(grid, geometry, box, seen, interpolation)
    sinks = source.facts.sinks[0] if len(source.facts.sinks) == 1 else ()
    cells = (geometry.patch_box(sink.row, sink.column, (rows, columns), box) for sink in sinks)
    parameters = source.provenance.parameters | {"interpolation": interpolation}
    return Heatmap(
        values,
        source.axes,
        seen,
        source.meaning,
        replace(source.provenance, geometry=geometry, parameters=parameters),
        grid,
        dict(source.labels),
        tuple(((cell.top + cell.bottom) / 2, (cell.left + cell.right) / 2) for cell in cells),
        tuple(geometry.to_photo(y, x) for y, x in source.facts.query_at),
        source.signed,
    )


def _check_fit(source: Any, geometry: Geometry) -> None:  # noqa: ANN401
    """Check that a map is of one photo, on a grid of rows and columns, and was made for the input of a geometry."""
    if "batch" in source.axes:
        raise MapError("a heatmap shows one photo. Choose one image of the batch: map.at(batch=0).to_heatmap(...).")
    if len(source.layout.grid) != 2:
        raise MapError(f"a heatmap needs a grid of rows and columns, got {source.layout.grid}.")
    box, size = source.layout.box, source.facts.input_size
    if size is None:  # the map need not reach the edge: it lies within one patch of it
        patch = box.height / source.layout.grid[0], box.width / source.layout.grid[1]
        fits = abs(box.bottom - geometry.input[0]) < patch[0] and abs(box.right - geometry.input[1]) < patch[1]
    else:
        fits = size == geometry.input
    if not fits:
        made, given = in_pixels(size or (box.bottom, box.right)), in_pixels(geometry.input)
        raise MapError(
            f"the map was made for {made} input pixels, but the geometry has {given}. Pass the geometry of this photo."
        )


def resampled(
    grid: NDArray[np.float32], geometry: Geometry, box: Box, seen: Box, interpolation: Interpolation
) -> NDArray[np.float32]:
    """Interpolate grid values at the centers of photo pixels.

    Args:
        grid: `(..., rows, columns)` values. NaN marks holes, which are the same in all grids.
        geometry: Position of the model's input on the photo.
        box: Input pixels that the grid covers.
        seen: Whole photo pixels to compute.
        interpolation: See `AttentionMap.to_heatmap`.

    Returns:
        `(..., height, width)` values; NaN under holes, elsewhere a weighted mean of the cells that are not holes.
    """
    top, left, bottom, right = (int(side) for side in seen)
    sides = range(top, bottom), range(left, right)

    def weights(how: Interpolation) -> list[NDArray[np.float32]]:
        return [_weights(geometry, box, grid.shape[axis - 2], pixels, axis, how) for axis, pixels in enumerate(sides)]

    down, across = weights(interpolation)
    holes = np.isnan(grid).any(tuple(range(grid.ndim - 2)))
    inner: NDArray[np.float32] = down @ np.nan_to_num(grid) @ across.T
    if holes.any():
        inner /= np.maximum(down @ (~holes).astype(np.float32) @ across.T, _LEAST)
        down, across = weights("nearest")
        inner[..., down @ holes.astype(np.float32) @ across.T > 0] = np.nan
    if (interpolation == "bicubic" or holes.any()) and inner.size:
        np.clip(inner, np.nanmin(grid, (-2, -1), keepdims=True), np.nanmax(grid, (-2, -1), keepdims=True), out=inner)
    return inner


def _weights(
    geometry: Geometry, box: Box, cells: int, pixels: range, axis: int, interpolation: Interpolation
) -> NDArray[np.float32]:
    """Compute the interpolation weight of each cell for each pixel along one axis: `(pixels, cells)`, rows sum to 1."""
    center = np.arange(pixels.start, pixels.stop, dtype=np.float64) + 0.5
    start, extent = (box.top, box.height) if axis == 0 else (box.left, box.width)
    offset = geometry.window.top if axis == 0 else geometry.window.left
    position = ((center - offset) / geometry.scale[axis] - start) / extent * cells  # in cells; cell i covers [i, i + 1)
    weights = np.zeros((len(pixels), cells))
    rows = np.arange(len(pixels))
    for tap, weight in KERNELS[interpolation](position):
        np.add.at(weights, (rows, tap.clip(0, cells - 1)), weight)
    return weights.astype(np.float32)


_Taps = list[tuple["NDArray[np.int64]", "NDArray[np.float64]"]]


def _nearest(position: NDArray[np.float64]) -> _Taps:
    return [(np.floor(position).astype(int), np.ones_like(position))]


def _bilinear(position: NDArray[np.float64]) -> _Taps:
    first = np.floor(position - 0.5).astype(int)
    far = position - 0.5 - first
    return [(first, 1 - far), (first + 1, far)]


def _bicubic(position: NDArray[np.float64]) -> _Taps:
    """Compute Keys' cubic convolution with a = -0.75, as in OpenCV and PyTorch."""
    a = -0.75
    first = np.floor(position - 0.5).astype(int)
    taps = []
    for step in (-1, 0, 1, 2):
        x = np.abs(position - 0.5 - first - step)
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
        taps.append((first + step, np.where(x <= 1, near, far)))
    return taps


KERNELS: dict[str, Callable[[NDArray[np.float64]], _Taps]] = {"nearest": _nearest, "bilinear": _bilinear, "bicubic": _bicubic}
