"""Color tables of 256 RGB rows each. Sequential color maps come from OpenCV; it has no diverging one, so that is built here."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from visattn._support.checks import one_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NAMES", "table"]

SEQUENTIAL = ("inferno", "magma", "plasma", "viridis", "cividis", "turbo", "jet", "bone", "gray")
DIVERGING = ("blue-white-red",)
NAMES = SEQUENTIAL + DIVERGING
NOT_MONOTONE = ("jet", "turbo")  # lightness falls in about half of their steps: brighter does not mean higher

_BLUE_WHITE_RED = ((5, 48, 97), (67, 147, 195), (247, 247, 247), (214, 96, 77), (103, 0, 31))


@cache
def table(name: str) -> NDArray[np.uint8]:
    """Return the colors of a color map, from the lowest to the highest value.

    Args:
        name: One of `NAMES`.

    Returns:
        Read-only array `(256, 3)` of uint8 RGB.
    """
    one_of(name, NAMES, "colormap")
    ramp = np.arange(256, dtype=np.uint8)
    if name == "gray":
        colors = np.stack([ramp] * 3, axis=1)
    elif name in DIVERGING:
        stops = np.linspace(0, 255, len(_BLUE_WHITE_RED))
        channels = [np.interp(ramp, stops, channel) for channel in np.transpose(_BLUE_WHITE_RED)]
        colors = np.stack(channels, axis=1).round().astype(np.uint8)
    else:
        from visattn._support.opencv import cv2

        bgr = cv2.applyColorMap(ramp[:, None], getattr(cv2, f"COLORMAP_{name.upper()}"))
        colors = np.ascontiguousarray(bgr[:, 0, ::-1])
    colors.flags.writeable = False
    return colors
