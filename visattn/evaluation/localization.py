"""Share of a map that lies on an object."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from visattn.core.geometry import Geometry
from visattn.core.maps import AttentionMap
from visattn.errors import MapError
from visattn.evaluation.cells import Cells, cells_of, partly
from visattn.evaluation.given import MapLike, MaskLike, given


def lift(attention_map: MapLike, mask: MaskLike, geometry: Geometry | None = None) -> NDArray[np.float64]:
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
    found: NDArray[np.float64] = np.asarray(_mass(shown, cells, "a lift") / cells.covered)
    return found


def energy_inside(attention_map: MapLike, mask: MaskLike, geometry: Geometry | None = None) -> NDArray[np.float64]:
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


def _mass(attention_map: AttentionMap, cells: Cells, what: str) -> NDArray[np.float64]:
    total = cells.values.sum((-1, -2))
    if cells.values.min() < 0 or not (total > 0).all():
        lack = "negative values" if cells.values.min() < 0 else "a sum that is not positive"
        raise MapError(f"{what} needs non-negative values with a positive sum; {attention_map.meaning} has {lack}.")
    found: NDArray[np.float64] = np.asarray((cells.values * cells.share).sum((-1, -2)) / total)
    return found
