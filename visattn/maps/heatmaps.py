"""Values in the photo's own pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from visattn._support.checks import one_of
from visattn.errors import OptionError
from visattn.geometry import Box
from visattn.provenance import Provenance

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Heatmap:
    """Values in the photo's own pixels, finite but for holes: NaN where the model dropped the token.

    Attributes:
        values: `(*axes, height, width)` float32.
        axes: Names of the leading dimensions.
        seen: The whole pixels that the model saw; outside it values are 0 and mean nothing.
        meaning: What a value is.
        provenance: How it was made.
        grid: The values before they were brought to pixels; scales are taken from it.
        labels: Names of the entries of an axis, where they have any.
        marks: Points `(y, x)` of the photo where sinks lie.
        signed: Whether zero is a value of its own, so that colors must diverge from it.
        normalized: Whether `normalize` has scaled the values to [0, 1] already.
    """

    values: NDArray[np.float32]
    axes: tuple[str, ...]
    seen: Box
    meaning: str
    provenance: Provenance
    grid: NDArray[np.float32]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    marks: tuple[tuple[float, float], ...] = ()
    signed: bool = False
    normalized: bool = False

    def at(self, **index: int) -> Heatmap:
        """One entry of each named axis.

        Raises:
            OptionError: If there is no such axis or entry.
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
