"""Scores of how well a map localizes an object, from 0 to 1 or relative to chance.

Every pixel that the model received has the value of its cell. A cell counts as `area * share` pixels on the object and
`area * (1 - share)` pixels off it. The ranking scores thus equal those of the upsampled map, without upsampling it; they depend on neither
scale nor sign. The shares of a map's sum need values that are not negative.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from visattn._support.checks import between
from visattn.core.geometry import Geometry
from visattn.core.maps import AttentionMap
from visattn.errors import MapError
from visattn.evaluation.given import MapLike, MaskLike, given
from visattn.evaluation.object_masks import Cells, cells_of, centers, partly

Array = NDArray[np.float64]


def auroc(attention_map: MapLike, mask: MaskLike, geometry: Geometry | None = None) -> Array:
    """Compute the area under the ROC curve: the probability that an object pixel has a larger value than another pixel.

    It is `P(on > off) + P(on = off) / 2`. Chance level is 0.5, a perfect map has 1.

    Args:
        attention_map: Map of one photo, signed or not; an explanation; or an array `(rows, columns)` over the whole photo.
        mask: `(height, width)` mask of the photo, true on the object: booleans, 0 and 1, or 0 and 255.
        geometry: Position of the model's input on the photo; by default that of the map or the explanation.

    Returns:
        Numbers from 0 to 1, one for each entry of the map's axes, `(*axes,)`.

    Raises:
        OptionError: If the geometry is not known.
        ShapeError: If the mask has other numbers or another size, or an array has other axes.
        MapError: If the map has a batch axis or holes, or the object covers none or all of what the model received.
    """
    on, off = _by_value(attention_map, mask, geometry)
    below = off.cumsum(-1) - off / 2
    found: Array = np.asarray((on * below).sum(-1) / on.sum(-1) / off.sum(-1))
    return found


def average_precision(attention_map: MapLike, mask: MaskLike, geometry: Geometry | None = None) -> Array:
    """Compute the average precision of object pixels: the area under the precision-recall curve.

    It is `sum_n (R_n - R_n-1) P_n` over falling thresholds, with recall R and precision P. Chance level is the object's share of the
    area.

    Args:
        attention_map: Map of one photo, signed or not; an explanation; or an array `(rows, columns)` over the whole photo.
        mask: `(height, width)` mask of the photo, true on the object: booleans, 0 and 1, or 0 and 255.
        geometry: Position of the model's input on the photo; by default that of the map or the explanation.

    Returns:
        Numbers from 0 to 1, one for each entry of the map's axes, `(*axes,)`.

    Raises:
        OptionError: If the geometry is not known.
        ShapeError: If the mask has other numbers or another size, or an array has other axes.
        MapError: If the map has a batch axis or holes, or the object covers none or all of what the model received.
    """
    on, off = (counts[..., ::-1] for counts in _by_value(attention_map, mask, geometry))
    kept = on.cumsum(-1)
    everything = kept + off.cumsum(-1)
    precision = np.divide(kept, everything, out=np.zeros_like(kept), where=everything > 0)
    found: Array = np.asarray((on * precision).sum(-1) / on.sum(-1))
    return found


def lift(attention_map: MapLike, mask: MaskLike, geometry: Geometry | None = None) -> Array:
    """Compute the lift of a map on an object: the object's share of the map's sum, divided by its share of the area.

    A lift of 1 is chance level. The maximum is 1 / share of the area. A cell on the object's outline counts by its share of object
    pixels.

    Args:
        attention_map: Non-negative map of one photo; an explanation; or an array `(rows, columns)` over the whole photo.
        mask: `(height, width)` mask of the photo, true on the object: booleans, 0 and 1, or 0 and 255.
        geometry: Position of the model's input on the photo; by default that of the map or the explanation.

    Returns:
        Lifts, one for each entry of the map's axes, `(*axes,)`.

    Raises:
        OptionError: If the geometry is not known.
        ShapeError: If the mask has other numbers or another size, or an array has other axes.
        MapError: If the map has a batch axis or holes, values are negative or all zero, or the object covers none or all of what the
            model received.
    """
    shown, mask, geometry = given(attention_map, mask, geometry)
    cells = partly(shown, mask, geometry)
    found: Array = np.asarray(_mass(shown, cells, "a lift") / cells.covered)
    return found


def energy_inside(attention_map: MapLike, mask: MaskLike, geometry: Geometry | None = None) -> Array:
    """Compute the share of a map's sum that lies inside a mask.

    Compare it with the mask's share of the area, which is the chance level. `lift` is the ratio of the two.

    Args:
        attention_map: Non-negative map of one photo; an explanation; or an array `(rows, columns)` over the whole photo.
        mask: `(height, width)` mask of the photo: booleans, 0 and 1, or 0 and 255; it may be empty.
        geometry: Position of the model's input on the photo; by default that of the map or the explanation.

    Returns:
        Numbers from 0 to 1, one for each entry of the map's axes, `(*axes,)`. Padding belongs to no mask.

    Raises:
        OptionError: If the geometry is not known.
        ShapeError: If the mask has other numbers or another size, or an array has other axes.
        MapError: If the map has a batch axis or holes, or values are negative or all zero.
    """
    shown, mask, geometry = given(attention_map, mask, geometry)
    return _mass(shown, cells_of(shown, mask, geometry), "a share of the sum")


def pointing_game(attention_map: MapLike, mask: MaskLike, geometry: Geometry | None = None, *, tolerance: float = 0) -> Array:
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
    found: Array = np.asarray((largest & hits).sum((-1, -2)) / largest.sum((-1, -2)))
    return found


def _by_value(attention_map: MapLike, mask: MaskLike, geometry: Geometry | None) -> tuple[Array, Array]:
    """Count pixels on and off the object at each distinct value, in ascending order: `(*axes, cells)` each, padded with zeros."""
    values, share, area, _ = partly(*given(attention_map, mask, geometry))
    flat = values.reshape(-1, area.size)
    order = flat.argsort(-1)
    ascending = np.take_along_axis(flat, order, -1)
    rank = np.cumsum(np.diff(ascending, axis=-1, prepend=ascending[:, :1]) > 0, axis=-1)  # equal values share one
    place = rank + area.size * np.arange(len(flat))[:, None]

    def summed(pixels: Array) -> Array:
        counts = np.bincount(place.ravel(), pixels.ravel()[order].ravel(), flat.size).astype(np.float64)
        return counts.reshape(*values.shape[:-2], area.size)

    return summed(area * share), summed(area * (1 - share))


def _mass(attention_map: AttentionMap, cells: Cells, what: str) -> Array:
    total = cells.values.sum((-1, -2))
    if cells.values.min() < 0 or not (total > 0).all():
        lack = "negative values" if cells.values.min() < 0 else "a sum that is not positive"
        raise MapError(f"{what} needs non-negative values with a positive sum; {attention_map.meaning} has {lack}.")
    found: Array = np.asarray((cells.values * cells.share).sum((-1, -2)) / total)
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
