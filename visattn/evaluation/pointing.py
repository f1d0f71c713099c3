"""The pointing game: whether the maximum of a map lies on the object."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from visattn._support.checks import between
from visattn.evaluation.cells import centers, partly
from visattn.geometry import Geometry
from visattn.maps import AttentionMap


def pointing_game(
    attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry, *, tolerance: float = 0
) -> NDArray[np.float64]:
    """Whether the largest value lies on the object: 1 if it does, 0 if not.

    The place of a cell is the pixel of the photo that its center lies in. Where several cells share the largest value, the result is
    the share of them that hit: an even map reaches what a point at random does.

    Args:
        attention_map: Of one photo; signed or not.
        mask: `(height, width)` of the photo, true on the object.
        geometry: Where the model's input lies on the photo.
        tolerance: In photo pixels. A place that is no farther from a pixel of the object hits too, from center to center.

    Returns:
        A number from 0 to 1 for each entry of the map's axes, `(*axes,)`.

    Raises:
        ShapeError: If the mask is no boolean mask of the photo's size.
        MapError: If the map is of several photos, or nothing of the object or everything that the model saw is object.
        OptionError: If the tolerance is negative.

    Reference:
        Zhang et al., "Top-down Neural Attention by Excitation Backprop", ECCV 2016, arXiv:1608.00507, who allow 15 pixels on photos of
        PASCAL VOC and COCO. Differs: the tolerance is 0 unless told, as masks are exact, and values are not enlarged to pixels before
        the largest is sought.
    """
    between(tolerance, 0, math.inf, "tolerance")
    values = partly(attention_map, mask, geometry).values
    hits = _near(mask, centers(attention_map, geometry, 0), centers(attention_map, geometry, 1), tolerance)
    largest = values == values.max((-1, -2), keepdims=True)
    found: NDArray[np.float64] = np.asarray((largest & hits).sum((-1, -2)) / largest.sum((-1, -2)))
    return found


def _near(mask: NDArray[np.bool_], rows: NDArray[np.int64], columns: NDArray[np.int64], reach: float) -> NDArray[np.bool_]:
    """`(rows, columns)`: whether a true pixel lies within `reach` of each of these, which must lie in the mask themselves."""
    height, width = mask.shape
    before = np.pad(mask.cumsum(1), ((0, 0), (1, 0)))  # how many are true in a row to the left of a column
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
