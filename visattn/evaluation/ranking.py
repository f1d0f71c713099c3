"""Ranking scores: how well a map's values separate object pixels from all others, independent of their scale and sign.

Every pixel that the model received has the value of its cell. A cell counts as `area * share` pixels on the object and
`area * (1 - share)` pixels off it. The scores thus equal those of the upsampled map, without upsampling it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from visattn.core.geometry import Geometry
from visattn.evaluation.cells import partly
from visattn.evaluation.given import MapLike, MaskLike, given

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
