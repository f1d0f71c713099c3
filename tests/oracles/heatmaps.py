"""Heatmaps pixel by pixel: each pixel center is mapped to the grid, and all cells are mixed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from visattn.core.geometry import Geometry


def slow_heat(
    grid: NDArray[np.float64], geometry: Geometry, cell: float, mix: Callable[[NDArray[np.float64], float, float], float]
) -> NDArray[np.float64]:
    """Map each pixel center to the grid and interpolate; `cell` is the side of a grid cell in input pixels."""
    height, width = geometry.photo
    window = geometry.window
    heat = np.zeros((height, width))
    for i in range(height):
        for j in range(width):
            y = (i + 0.5 - window.top) * geometry.input[0] / (window.bottom - window.top) / cell
            x = (j + 0.5 - window.left) * geometry.input[1] / (window.right - window.left) / cell
            if 0 <= y < grid.shape[0] and 0 <= x < grid.shape[1]:
                heat[i, j] = mix(grid, y, x)
    return heat


def mix_nearest(grid: NDArray[np.float64], y: float, x: float) -> float:
    """Return the value of the cell that contains the point."""
    return float(grid[int(y), int(x)])


def mix_bilinear(grid: NDArray[np.float64], y: float, x: float) -> float:
    """Interpolate with a tent function around each cell center."""
    total = 0.0
    for r in range(-1, grid.shape[0] + 1):  # includes a border of repeated edge cells
        for c in range(-1, grid.shape[1] + 1):
            tent = max(0.0, 1 - abs(y - (r + 0.5))) * max(0.0, 1 - abs(x - (c + 0.5)))
            total += tent * grid[min(max(r, 0), grid.shape[0] - 1), min(max(c, 0), grid.shape[1] - 1)]
    return total


def keys_weight(distance: float) -> float:
    d, a = abs(distance), -0.75
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def mix_bicubic(grid: NDArray[np.float64], y: float, x: float) -> float:
    """Interpolate with Keys' kernel around each cell center, clipped to the range of the grid."""
    total = 0.0
    for r in range(-2, grid.shape[0] + 2):
        for c in range(-2, grid.shape[1] + 2):
            value = grid[min(max(r, 0), grid.shape[0] - 1), min(max(c, 0), grid.shape[1] - 1)]
            total += keys_weight(y - (r + 0.5)) * keys_weight(x - (c + 0.5)) * value
    return min(max(total, float(grid.min())), float(grid.max()))
