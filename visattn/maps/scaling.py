"""How raw values become 0 to 1. `normalize` writes down how it did it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from visattn._support.checks import one_of
from visattn._support.types import Normalization
from visattn.errors import MapError
from visattn.maps.heatmaps import Heatmap

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PERCENTILE = (1.0, 99.0)


def value_range(
    grid: NDArray[np.float32], how: Normalization, signed: bool = False, *, holes: bool = False
) -> tuple[float, float]:
    """The raw values that become 0 and 1.

    Args:
        grid: Raw values, all finite.
        how: `minmax`; `percentile` (1st to 99th; of signed values the 99th of their magnitudes on either side of zero); `symmetric`
            about zero; `none` (values are in [0, 1] already); `auto`: symmetric for signed values, minmax otherwise.
        signed: Whether zero is a value of its own.
        holes: Whether NaN stands for a hole, and is left out.

    Returns:
        `(low, high)`; equal where the values are constant.

    Raises:
        OptionError: If `how` is unknown.
        MapError: If values are not finite, or lie outside [0, 1] under `none`.
    """
    one_of(how, get_args(Normalization), "normalization")
    grid = grid[~np.isnan(grid)] if holes else grid
    low, high = float(grid.min()), float(grid.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise MapError(f"{int((~np.isfinite(grid)).sum())} of {grid.size} map values are NaN or infinite; nothing is drawn.")
    if how == "none":
        if low < 0 or high > 1:
            raise MapError(
                f"normalize='none' takes values in [0, 1], got {low:.4g} to {high:.4g}. Choose 'minmax' or 'symmetric'."
            )
        return 0.0, 1.0
    if how == "symmetric" or (how == "auto" and signed):
        bound = max(abs(low), abs(high))
        return -bound, bound
    if how == "percentile" and signed:
        bound = float(np.percentile(np.abs(grid), _PERCENTILE[1])) or max(abs(low), abs(high))
        return -bound, bound
    if how == "percentile":
        inner = tuple(float(edge) for edge in np.percentile(grid, _PERCENTILE))
        low, high = inner if inner[0] < inner[1] else (low, high)  # one peak on a flat ground is no constant map
    return low, high


def normalize(heat: Heatmap, how: Normalization = "auto", shared: Sequence[str] = ()) -> Heatmap:
    """Values scaled to [0, 1]; what was done is written into the provenance.

    Args:
        heat: Raw heatmap.
        how: See `value_range`.
        shared: Axes whose entries share one scale; the others are scaled one by one.

    Returns:
        A heatmap whose values lie in [0, 1] (0 where a map is constant).

    Raises:
        OptionError: If `how` or an axis is unknown.
        MapError: If values lie outside [0, 1] under `none`, or there are none.
    """
    for name in shared:
        one_of(name, heat.axes, "axis")
    if not heat.values.size:
        raise MapError(f"a heatmap without values has no scale, got {heat.axes} {heat.values.shape}.")
    own = tuple(i for i, name in enumerate(heat.axes) if name not in shared)
    values, grid = np.zeros_like(heat.values), np.zeros_like(heat.grid)
    ranges = []
    for index in np.ndindex(*(heat.values.shape[i] for i in own)):
        where: list[Any] = [slice(None)] * len(heat.axes)
        for axis, i in zip(own, index, strict=True):
            where[axis] = i
        place = tuple(where)
        low, high = value_range(heat.grid[place], how, heat.signed, holes=True)
        ranges.append((low, high))
        if high > low:
            wide = np.float64 if high - low > float(np.finfo(np.float32).max) else np.float32  # where float32 would overflow
            for made, raw in ((values, heat.values), (grid, heat.grid)):
                made[place] = ((raw[place].astype(wide, copy=False) - low) / (high - low)).clip(0, 1)
    values[np.isnan(heat.values)], grid[np.isnan(heat.grid)] = np.nan, np.nan
    top, left, bottom, right = (int(side) for side in heat.seen)
    unseen = np.ones(heat.values.shape[-2:], bool)
    unseen[top:bottom, left:right] = False
    values[..., unseen] = 0
    scope = f"{how}, one scale over {' and '.join(shared)}" if shared else how
    provenance = heat.provenance.but(
        normalization=scope,
        value_range=(min(low for low, _ in ranges), max(high for _, high in ranges)),
    )
    signed = heat.signed or how == "symmetric"
    return replace(heat, values=values, grid=grid, provenance=provenance, signed=signed, normalized=True)
