"""Heatmaps in the photo's own pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from visattn._support.checks import one_of
from visattn._support.reprs import brief
from visattn.core.geometry import Box
from visattn.core.offers import offered
from visattn.core.provenance import Provenance
from visattn.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


@dataclass(frozen=True, eq=False)
class Heatmap:
    """Heatmap in the photo's own pixels. All values are finite, except NaN where the model dropped a token.

    Attributes:
        values: `(*axes, height, width)` float32 values.
        axes: Names of the leading dimensions.
        seen: Whole pixels that the model received. Values outside are 0 and have no meaning.
        meaning: Quantity of the values.
        provenance: Origin of the map.
        grid: Values on the grid before interpolation, from which the color scale is computed.
        labels: Names of the entries of an axis, if they have names.
        marks: Photo points `(y, x)` of the sinks.
        query: Photo point `(y, x)` of the query, if it is a patch.
        signed: Whether the heatmap needs a diverging color scale centered on zero.
        normalized: Whether `normalize` has already scaled the values to [0, 1].
    """

    values: NDArray[np.float32]
    axes: tuple[str, ...]
    seen: Box
    meaning: str
    provenance: Provenance
    grid: NDArray[np.float32]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    marks: tuple[tuple[float, float], ...] = ()
    query: tuple[tuple[float, float], ...] = ()
    signed: bool = False
    normalized: bool = False

    __repr__ = brief

    def numpy(self) -> NDArray[np.float32]:
        """Return the values, `(*axes, height, width)`."""
        return self.values

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the values, for `numpy.asarray`."""
        return np.array(self.values, dtype, copy=copy)

    def _repr_png_(self) -> bytes | None:
        """Return the colors for notebooks; None if there are several panels."""
        return offered("notebook", "heatmap")(self)

    def at(self, **index: int) -> Heatmap:
        """Select one entry of each named axis.

        Raises:
            OptionError: If an axis or entry does not exist.
        """
        result = self
        for name, i in index.items():
            axis = result.axes.index(one_of(name, result.axes, "axis"))
            size = result.values.shape[axis]
            if not -size <= i < size:
                raise OptionError(f"{name} must lie in [{-size}, {size - 1}], got {i}.")
            result = replace(
                result,
                values=np.take(result.values, [i], axis).squeeze(axis),
                grid=np.take(result.grid, [i], axis).squeeze(axis),
                axes=result.axes[:axis] + result.axes[axis + 1 :],
                labels={key: value for key, value in result.labels.items() if key != name},
            )
        return result
