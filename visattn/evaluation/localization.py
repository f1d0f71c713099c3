"""Share of a map that lies on an object."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from visattn.errors import MapError
from visattn.evaluation.cells import Cells, cells_of, partly
from visattn.geometry import Geometry
from visattn.maps import AttentionMap


def lift(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> NDArray[np.float64]:
    """Compute the lift of a map on an object: the object's share of the map's sum, divided by its share of the area.

    A lift of 1 is chance level. The maximum is 1 / share of the area. A cell on the object's outline counts by its share of object
    pixels.

    Args:
        attention_map: Non-negative map of one photo.
        mask: `(height, width)` boolean mask of the photo, true on the object.
        geometry: Position of the model's input on the photo.

    Returns:
        Lifts, one for each entry of the map's axes, `(*axes,)`.

    Raises:
        ShapeError: If the mask is not a boolean mask of the photo's size.
        MapError: If the map has a batch axis or holes, values are negative or all zero, or the object covers none or all of what the
            model received.
    """
    cells = partly(attention_map, mask, geometry)
    found: NDArray[np.float64] = np.asarray(_mass(attention_map, cells, "a lift") / cells.covered)
    return found


def energy_inside(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> NDArray[np.float64]:
    """Compute the share of a map's sum that lies inside a mask.

    Compare it with the mask's share of the area, which is the chance level. `lift` is the ratio of the two.

    Args:
        attention_map: Non-negative map of one photo.
        mask: `(height, width)` boolean mask of the photo; it may be empty.
        geometry: Position of the model's input on the photo.

    Returns:
        Numbers from 0 to 1, one for each entry of the map's axes, `(*axes,)`. Padding belongs to no mask.

    Raises:
        ShapeError: If the mask is not a boolean mask of the photo's size.
        MapError: If the map has a batch axis or holes, or values are negative or all zero.
    """
    return _mass(attention_map, cells_of(attention_map, mask, geometry), "a share of the sum")


def _mass(attention_map: AttentionMap, cells: Cells, what: str) -> NDArray[np.float64]:
    total = cells.values.sum((-1, -2))
    if cells.values.min() < 0 or not (total > 0).all():
        raise MapError(f"{what} needs non-negative values with a positive sum; {attention_map.meaning} has no such values.")
    found: NDArray[np.float64] = np.asarray((cells.values * cells.share).sum((-1, -2)) / total)
    return found
