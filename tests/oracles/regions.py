"""Masks and boxes pixel by pixel: values are collected from the largest on, and connected parts are filled one pixel after another."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Pixels = set[tuple[int, int]]
_EQUAL = 1e-6  # of the largest magnitude


def known(heat: NDArray[np.float64], seen: NDArray[np.bool_]) -> dict[tuple[int, int], float]:
    """Return the value of each pixel that the model received and that has one."""
    height, width = heat.shape
    pixels = ((y, x) for y in range(height) for x in range(width))
    return {(y, x): float(heat[y, x]) for y, x in pixels if seen[y, x] and not math.isnan(heat[y, x])}


def by_mass(values: dict[tuple[int, int], float], mass: float) -> Pixels:
    """Take pixels from the largest on until they hold the share of all positive values; equal pixels come together."""
    near = _EQUAL * max(abs(value) for value in values.values())
    left = sorted((value for value in values.values() if value > 0), reverse=True)
    total, held, least = math.fsum(left), 0.0, math.inf
    for value in left:
        if held >= (mass - _EQUAL * (mass < 1)) * total:
            break
        held, least = held + value, value
    return {place for place, value in values.items() if value > 0 and value >= least - near}


def by_quantile(values: dict[tuple[int, int], float], quantile: float) -> Pixels:
    """Take the pixels at or above the quantile, which lies between two neighbors in the sorted list."""
    near = _EQUAL * max(abs(value) for value in values.values())
    ascending = sorted(values.values())
    place = quantile * (len(ascending) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ascending) - 1)
    least = ascending[below] + (place - below) * (ascending[above] - ascending[below])
    return {at for at, value in values.items() if value >= least - near}


def parts(pixels: Pixels) -> list[Pixels]:
    """Return the parts that are connected along sides of pixels, the largest first."""
    left, found = set(pixels), []
    while left:
        part, border = set(), [left.pop()]
        while border:
            y, x = border.pop()
            part.add((y, x))
            for neighbor in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if neighbor in left:
                    left.remove(neighbor)
                    border.append(neighbor)
        found.append(part)
    return sorted(found, key=len, reverse=True)


def box_around(pixels: Pixels) -> tuple[int, int, int, int]:
    """Return top, left, bottom and right as edges of pixels."""
    rows, columns = [y for y, _ in pixels], [x for _, x in pixels]
    return min(rows), min(columns), max(rows) + 1, max(columns) + 1
