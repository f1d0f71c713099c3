"""Pointing game: does the maximum of a map lie on the object?"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from visattn._support.checks import between
from visattn.core.geometry import Geometry
from visattn.evaluation.cells import centers, partly
from visattn.evaluation.given import MapLike, MaskLike, given


def pointing_game(
    attention_map: MapLike, mask: MaskLike, geometry: Geometry | None = None, *, tolerance: float = 0
) -> NDArray[np.float64]:
    """Play the pointing game: return 1 if the map's maximum lies on the object, else 0.

    The location of a cell is the photo pixel that contains its center. If several cells share the largest value, the result is the
    share of them that hit, so a constant map scores like a random point.

    Args:
        attention_map: Map of one photo, signed or not; an explanation; or an array `(rows, columns)` over the whole photo.
        mask: `(height, width)` mask of the photo, true on the object: booleans, 0 and 1, or 0 and 255.
        geometry: Position of the model's input on the photo; by default that of the map or the explanation.
        tolerance: Distance in photo pixels, measured between pixel centers, up to which a point beside the object also hits.

    Returns:
        Numbers from 0 to 1, one for each entry of the map's axes, `(*axes,)`.

    Raises:
        OptionError: If the tolerance is negative, or the geometry is not known.
        ShapeError: If the mask has other numbers or another size, or an array has other axes.
        MapError: If the map has a batch axis or holes, or the object covers none or all of what the model received.

    Reference:
        Zhang et al., "Top-down Neural Attention by Excitation Backprop", ECCV 2016, arXiv:1608.00507, with a tolerance of 15
        pixels on PASCAL VOC and COCO. Differs: the default tolerance is 0, as masks are exact, and the maximum is taken on the grid
        instead of in the upsampled map.
    """
    between(tolerance, 0, math.inf, "tolerance")
    shown, mask, geometry = given(attention_map, mask, geometry)
    values = partly(shown, mask, geometry).values
    hits = _near(mask, centers(shown, geometry, 0), centers(shown, geometry, 1), tolerance)
    largest = values == values.max((-1, -2), keepdims=True)
    found: NDArray[np.float64] = np.asarray((largest & hits).sum((-1, -2)) / largest.sum((-1, -2)))
    return found


def _near(mask: NDArray[np.bool_], rows: NDArray[np.int64], columns: NDArray[np.int64], reach: float) -> NDArray[np.bool_]:
    """Return `(rows, columns)`: true for points inside the mask's bounds that have a true pixel within `reach`."""
    height, width = mask.shape
    before = np.pad(mask.cumsum(1), ((0, 0), (1, 0)))  # number of true pixels to the left of each column
    found = np.zeros((len(rows), len(columns)), bool)
    farthest = math.floor(min(reach, height))
    for step in range(-farthest, farthest + 1):
        half = math.floor(min(math.sqrt(reach**2 - step**2), width))
        left, right = (columns - half).clip(0, width), (columns + half + 1).clip(0, width)
        there = (rows + step >= 0) & (rows + step < height)
        counts = before[(rows + step).clip(0, height - 1)]
        found |= there[:, None] & (counts[:, right] > counts[:, left])
    inside = ((rows >= 0) & (rows < height))[:, None] & ((columns >= 0) & (columns < width))
    found &= inside
    return found
