"""Normalization of raw values to [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from visattn._support.checks import one_of
from visattn._support.language import option
from visattn._support.types import Normalization
from visattn.core.maps.heatmaps import Heatmap
from visattn.errors import MapError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["names_of", "range_words", "resolved", "shows_nothing"]

_PERCENTILE = (1.0, 99.0)
_SPARSE = 0.75  # a map is sparse if its inner 98 % span less than this share of its range
_EVEN = 0.05  # values of one sign whose range is at most this share of the largest magnitude are nearly even


def nearly_even(low: float, high: float) -> bool:
    """Check whether a range is so narrow that colors over it would show noise."""
    return low * high > 0 and high - low <= _EVEN * max(abs(low), abs(high))


def shows_nothing(mode: Normalization, low: float, high: float) -> bool:
    """Check whether a color scale shows nothing: it is constant, or nearly even and nobody asked for it.

    Args:
        mode: Normalization that was asked for. Only `auto` leaves nearly even maps without colors.
        low: Raw value of the first color.
        high: Raw value of the last color.
    """
    return not low < high or (mode == "auto" and nearly_even(low, high))


def resolved(mode: Normalization, grid: NDArray[np.float32], signed: bool = False) -> Normalization:
    """Return the normalization that `auto` stands for, or `mode` itself.

    It is `symmetric` for signed values. It is `percentile` if a few cells would hide the rest: the inner 98 % of the values span less than
    three quarters of the range, and the cells above them hold less than half of the sum above the minimum. If these hold more, the map
    is those cells, and the rest may be noise; it is so too if the inner values are nearly even. Otherwise it is `minmax`.

    Args:
        mode: See `value_range`.
        grid: Raw values; NaN marks holes.
        signed: Whether the scale is centered on zero.
    """
    if mode != "auto" or signed:
        return "symmetric" if mode == "auto" else mode
    values = grid[~np.isnan(grid)].astype(np.float64)
    if not values.size:
        return "minmax"
    values.sort()
    places = np.divide(_PERCENTILE, 100) * (values.size - 1)
    low, high = np.interp(places, np.arange(values.size), values)  # np.percentile takes ten times as long
    above, start = values[values > high], values[0]
    hidden = high - low < _SPARSE * (values[-1] - start) and not nearly_even(low, high)
    return "percentile" if hidden and (above - start).sum() < (values - start).sum() / 2 else "minmax"


def range_words(low: float, high: float) -> str:
    """Return a range with as many digits as tell its ends apart, such as "0.505 to 0.507"."""
    digits = next((few for few in range(2, 7) if f"{low:.{few}g}" != f"{high:.{few}g}"), 7)
    return f"{low:.{digits}g} to {high:.{digits}g}"


def names_of(mode: Normalization, grids: Iterable[NDArray[np.float32]], signed: bool) -> str:
    """Return the names of the normalizations of several maps; `auto` is replaced by those that it stands for."""
    return " or ".join(dict.fromkeys(resolved(mode, grid, signed) for grid in grids))


def value_range(
    grid: NDArray[np.float32], mode: Normalization, signed: bool = False, *, holes: bool = False
) -> tuple[float, float]:
    """Return the raw values that are mapped to 0 and 1.

    Args:
        grid: Raw values, all finite.
        mode: `minmax`; `percentile`, from the 1st to the 99th, or for signed values the 99th of the magnitudes on both sides of zero;
            `symmetric` around zero; `none` for values already in [0, 1]; or `auto`, see `resolved`.
        signed: Whether the scale is centered on zero in modes `auto` and `percentile`.
        holes: Whether NaN marks holes, which are ignored.

    Returns:
        `(low, high)`, which are equal if the values are constant.

    Raises:
        OptionError: If `mode` is unknown.
        MapError: If values are not finite, or lie outside [0, 1] in mode `none`, or there are none.
    """
    one_of(mode, get_args(Normalization), "normalization")
    grid = grid[~np.isnan(grid)] if holes else grid
    if not grid.size:
        raise MapError("a map to normalize must have values, got holes alone.")
    low, high = float(grid.min()), float(grid.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise MapError(f"{int((~np.isfinite(grid)).sum())} of {grid.size} map values are NaN or infinite; nothing is drawn.")
    mode = resolved(mode, grid, signed)
    if mode == "none":
        if low < 0 or high > 1:
            raise MapError(
                f"{option('normalize', 'none')} takes values in [0, 1], got {low:.4g} to {high:.4g}. Choose 'minmax' or 'symmetric'."
            )
        return 0.0, 1.0
    if mode == "symmetric":
        bound = max(abs(low), abs(high))
        return -bound, bound
    if mode == "percentile" and signed:
        bound = float(np.percentile(np.abs(grid), _PERCENTILE[1])) or max(abs(low), abs(high))
        return -bound, bound
    if mode == "percentile":
        inner = tuple(float(edge) for edge in np.percentile(grid, _PERCENTILE))
        low, high = inner if inner[0] < inner[1] else (low, high)  # a single peak on a flat background: use the full range
    return low, high


def normalize(heat: Heatmap, mode: Normalization = "auto", shared_axes: Sequence[str] = ()) -> Heatmap:
    """Scale values to [0, 1] and record the scaling in the provenance.

    Args:
        heat: Raw heatmap.
        mode: See `value_range`.
        shared_axes: Axes whose entries share one scale. Entries of other axes are scaled separately.

    Returns:
        A heatmap with values in [0, 1]; a constant map becomes 0, and in mode `auto` one whose range is at most 5 % of its maximum.

    Raises:
        OptionError: If `mode` or an axis is unknown.
        MapError: If the heatmap is empty, or values lie outside [0, 1] in mode `none`.
    """
    for name in shared_axes:
        one_of(name, heat.axes, "axis")
    if not heat.values.size:
        raise MapError(f"a heatmap to normalize must have values, got the shape {heat.values.shape} with axes {heat.axes}.")
    own = tuple(i for i, name in enumerate(heat.axes) if name not in shared_axes)
    values, grid = np.zeros_like(heat.values), np.zeros_like(heat.grid)
    ranges = []
    for index in np.ndindex(*(heat.values.shape[i] for i in own)):
        where: list[Any] = [slice(None)] * len(heat.axes)
        for axis, i in zip(own, index, strict=True):
            where[axis] = i
        place = tuple(where)
        low, high = value_range(heat.grid[place], mode, heat.signed, holes=True)
        ranges.append((low, high))
        if not shows_nothing(mode, low, high):
            wide = np.float64 if high - low > float(np.finfo(np.float32).max) else np.float32  # float32 would overflow
            for made, raw in ((values, heat.values), (grid, heat.grid)):
                made[place] = ((raw[place].astype(wide, copy=False) - low) / (high - low)).clip(0, 1)
    values[np.isnan(heat.values)], grid[np.isnan(heat.grid)] = np.nan, np.nan
    top, left, bottom, right = (int(side) for side in heat.seen)
    unseen = np.ones(heat.values.shape[-2:], bool)
    unseen[top:bottom, left:right] = False
    values[..., unseen] = 0
    scope = f"{mode}, one scale over {' and '.join(shared_axes)}" if shared_axes else mode
    provenance = heat.provenance.but(
        normalization=scope,
        value_range=(min(low for low, _ in ranges), max(high for _, high in ranges)),
    )
    signed = heat.signed or mode == "symmetric"
    return replace(heat, values=values, grid=grid, provenance=provenance, signed=signed, normalized=True)


def within(heat: Heatmap, low: float, high: float) -> Heatmap:
    """Scale values so that `low` becomes 0 and `high` 1, and clip the rest; so maps of several photos can share one scale.

    Args:
        heat: Raw heatmap.
        low: Raw value of 0.
        high: Raw value of 1; if it is not above `low`, all values become 0.

    Returns:
        A heatmap with values in [0, 1].
    """

    def scaled(raw: NDArray[np.float32]) -> NDArray[np.float32]:
        found = (raw.astype(np.float64) - low) / (high - low) if high > low else np.where(np.isnan(raw), np.nan, 0.0)
        return found.clip(0, 1).astype(np.float32)

    provenance = heat.provenance.but(normalization="one scale for all", value_range=(low, high))
    return replace(heat, values=scaled(heat.values), grid=scaled(heat.grid), provenance=provenance, normalized=True)
