"""How well a map's values tell the object's pixels from all others, whatever the values' scale and sign.

Every pixel that the model saw has the value of its cell. A cell counts `area * share` pixels on the object and `area * (1 - share)` off
it, so nothing is enlarged, and the numbers are those of the enlarged map.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from visattn.evaluation.cells import partly
from visattn.geometry import Geometry
from visattn.maps import AttentionMap

Array = NDArray[np.float64]


def auroc(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> Array:
    """The chance that a pixel of the object has a larger value than one beside it: 0.5 is chance, 1 the best.

    The area under the ROC curve, `P(on > off) + P(on = off) / 2`.

    Args:
        attention_map: Of one photo; signed or not.
        mask: `(height, width)` of the photo, true on the object.
        geometry: Where the model's input lies on the photo.

    Returns:
        A number from 0 to 1 for each entry of the map's axes, `(*axes,)`.

    Raises:
        ShapeError: If the mask is no boolean mask of the photo's size.
        MapError: If the map is of several photos, or nothing of the object or everything that the model saw is object.
    """
    on, off = _by_value(attention_map, mask, geometry)
    below = off.cumsum(-1) - off / 2
    found: Array = np.asarray((on * below).sum(-1) / on.sum(-1) / off.sum(-1))
    return found


def average_precision(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> Array:
    """The mean over the object's pixels of how much of all that has no smaller value is object; the object's share is chance.

    `sum_n (R_n - R_n-1) P_n` over falling thresholds, with recall R and precision P: the step-wise area under the curve of both.

    Args:
        attention_map: Of one photo; signed or not.
        mask: `(height, width)` of the photo, true on the object.
        geometry: Where the model's input lies on the photo.

    Returns:
        A number from 0 to 1 for each entry of the map's axes, `(*axes,)`.

    Raises:
        ShapeError: If the mask is no boolean mask of the photo's size.
        MapError: If the map is of several photos, or nothing of the object or everything that the model saw is object.
    """
    on, off = (counts[..., ::-1] for counts in _by_value(attention_map, mask, geometry))
    kept = on.cumsum(-1)
    everything = kept + off.cumsum(-1)
    precision = np.divide(kept, everything, out=np.zeros_like(kept), where=everything > 0)
    found: Array = np.asarray((on * precision).sum(-1) / on.sum(-1))
    return found


def _by_value(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> tuple[Array, Array]:
    """Pixels on and off the object at each value, the smallest first: each `(*axes, cells)`, with zeros where values are fewer."""
    values, share, area, _ = partly(attention_map, mask, geometry)
    flat = values.reshape(-1, area.size)
    order = flat.argsort(-1)
    ascending = np.take_along_axis(flat, order, -1)
    rank = np.cumsum(np.diff(ascending, axis=-1, prepend=ascending[:, :1]) > 0, axis=-1)  # equal values have one
    place = rank + area.size * np.arange(len(flat))[:, None]

    def summed(pixels: Array) -> Array:
        counts = np.bincount(place.ravel(), pixels.ravel()[order].ravel(), flat.size).astype(np.float64)
        return counts.reshape(*values.shape[:-2], area.size)

    return summed(area * share), summed(area * (1 - share))
