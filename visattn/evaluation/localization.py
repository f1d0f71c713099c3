"""How much of a map lies on the object."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from visattn.errors import MapError
from visattn.evaluation.cells import Cells, cells_of, partly
from visattn.geometry import Geometry
from visattn.maps import AttentionMap


def lift(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> NDArray[np.float64]:
    """How much denser a map lies on an object than over all that the model saw: 1 is chance, 1 / share of area the most there is.

    The share of the map's sum that lies on the object, over the object's share of the area; a cell that the outline cuts counts by
    the share of its pixels.

    Args:
        attention_map: Of one photo; not negative.
        mask: `(height, width)` of the photo, true on the object.
        geometry: Where the model's input lies on the photo.

    Returns:
        A number for each entry of the map's axes, `(*axes,)`.

    Raises:
        ShapeError: If the mask is no boolean mask of the photo's size.
        MapError: If the map is of several photos, values are negative or all zero, or nothing of the object or everything that the
            model saw is object.
    """
    cells = partly(attention_map, mask, geometry)
    found: NDArray[np.float64] = np.asarray(_mass(attention_map, cells, "a lift") / cells.covered)
    return found


def mass_on(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> NDArray[np.float64]:
    """The share of a map's sum that lies on a mask, such as that of a mark that tells the class.

    To be read beside the mask's share of the area, which a map that knows nothing reaches; `lift` is the one over the other.

    Args:
        attention_map: Of one photo; not negative.
        mask: `(height, width)` of the photo; it may be empty.
        geometry: Where the model's input lies on the photo.

    Returns:
        A number from 0 to 1 for each entry of the map's axes, `(*axes,)`. What lies on padding is on no mask.

    Raises:
        ShapeError: If the mask is no boolean mask of the photo's size.
        MapError: If the map is of several photos, or values are negative or all zero.
    """
    return _mass(attention_map, cells_of(attention_map, mask, geometry), "a share of the sum")


def _mass(attention_map: AttentionMap, cells: Cells, what: str) -> NDArray[np.float64]:
    total = cells.values.sum((-1, -2))
    if cells.values.min() < 0 or not (total > 0).all():
        raise MapError(f"{what} needs non-negative values with a positive sum; {attention_map.meaning} has none.")
    found: NDArray[np.float64] = np.asarray((cells.values * cells.share).sum((-1, -2)) / total)
    return found
