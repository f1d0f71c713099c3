"""Shapes as conditions on coordinates. Each lies in the unit circle; `x` points right and `y` down."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi, sin

import numpy as np
from numpy.typing import NDArray

Coordinates = NDArray[np.float64]
Inside = Callable[[Coordinates, Coordinates], NDArray[np.bool_]]


def _polygon(corners: list[tuple[float, float]]) -> Inside:
    """Return the condition for the inside of a polygon: a ray to the right crosses the border an odd number of times."""

    def inside(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
        crossed = np.zeros(x.shape, bool)
        for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
            if y0 != y1:
                crossed ^= ((y0 > y) != (y1 > y)) & (x < (x1 - x0) * (y - y0) / (y1 - y0) + x0)
        return crossed

    return inside


def _regular(corners: int, inner: float = 1.0) -> Inside:
    """Build a regular polygon with a corner at the top, or a star whose inner corners have the radius `inner`."""
    count = corners if inner == 1 else 2 * corners
    radii = [1.0 if i % 2 == 0 or inner == 1 else inner for i in range(count)]
    return _polygon([(r * sin(2 * pi * i / count), -r * cos(2 * pi * i / count)) for i, r in enumerate(radii)])


_ARM, _HALF = 3 / 10**0.5, 1 / 10**0.5  # a bar three times as long as wide, its corners on the unit circle


def _disk(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    return x * x + y * y <= 1


def _bar(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    return (abs(x) <= _ARM) & (abs(y) <= _HALF)


def _cross(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    return _bar(x, y) | _bar(y, x)


def _ring(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    return _disk(x, y) & (x * x + y * y >= 0.3)


def _crescent(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    return _disk(x, y) & ((x - 0.5) ** 2 + y * y >= 0.5)


def _semicircle(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    return _disk(x, y) & (y <= 0)


def _heart(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    u, v = 1.36 * x, 0.12 - 1.36 * y
    round_part = u * u + v * v - 1
    return round_part * round_part * round_part - u * u * v * v * v <= 0


LABELS: dict[str, Inside] = {  # sorted, as the classes of ImageFolder are
    "crescent": _crescent,
    "cross": _cross,
    "heart": _heart,
    "ring": _ring,
    "star": _regular(5, 0.45),
    "triangle": _regular(3),
}
DISTRACTORS: dict[str, Inside] = {
    "bar": _bar,
    "disk": _disk,
    "hexagon": _regular(6),
    "semicircle": _semicircle,
    "square": _regular(4),
}
AREAS = {  # for radius 1
    "bar": 1.2,
    "crescent": 1.7837,
    "cross": 2.0,
    "disk": 3.1416,
    "heart": 1.9799,
    "hexagon": 2.5981,
    "ring": 2.1991,
    "semicircle": 1.5708,
    "square": 2.0,
    "star": 1.3225,
    "triangle": 1.299,
}
