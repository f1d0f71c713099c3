"""Regions of a map: the cells or the photo's pixels with the largest values, and the box of the largest connected part."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from visattn._support.checks import between
from visattn._support.language import option, worded
from visattn._support.opencv import cv2
from visattn._support.types import Interpolation
from visattn.core.geometry import Box, Geometry
from visattn.core.maps.scaling import nearly_even, range_words
from visattn.core.maps.shares import Share as Share
from visattn.errors import MapError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Region", "mask_of", "mass_of", "region_of"]

_ROUNDING = 1e-6  # of the largest magnitude: interpolation in float32 makes equal values differ by less


class Region(NamedTuple):
    """Largest connected part of a mask.

    Attributes:
        share: What decided the mask.
        box: Its bounding box in whole pixels of the photo.
        parts: Number of connected parts of the mask.
    """

    share: Share
    box: Box
    parts: int

    def words(self) -> str:
        """Return where the region lies, as the caption and the command say it."""
        top, left, bottom, right = self.box
        what = "that hold {:g} of the map" if self.share.kind == "mass" else "at or above quantile {:g}"
        of = f", the largest of {self.parts} parts" if self.parts > 1 else ""
        place = f"x {left:g} to {right:g}, y {top:g} to {bottom:g}{of}"
        return f"box of the pixels {what.format(self.share.value)}: {place}"

    def enlarged(self, factor: int) -> Region:
        """Return the region in a photo that is enlarged by a factor."""
        return self._replace(box=Box(*(factor * side for side in self.box)))

    def facts(self) -> dict[str, Any]:
        """Return the region as plain values for provenance."""
        return {"of": str(self.share), **self.box._asdict(), "parts": self.parts, "words": self.words()}


def mass_of(attention_map: Any, share: float) -> Any:  # noqa: ANN401 - its class imports this file
    """Return the mask of cells of an `AttentionMap`; see `AttentionMap.mass`."""
    between(share, 0, 1, "mass")
    flat = attention_map.values.flatten(len(attention_map.axes)).double().nan_to_num()  # holes count as 0
    total = flat.sum(-1, keepdim=True)
    if bool((flat < 0).any()) or not bool((total > 0).all()):
        low, high = float(flat.min()), float(flat.max())
        raise MapError(
            "a mass mask needs grids of non-negative values with a positive sum, got "
            f"{attention_map.meaning} from {low:.4g} to {high:.4g}. Use {option('contours')}."
        )
    ascending, order = (flat / total).sort(-1)
    kept = ascending.cumsum(-1) > 1 - share + 1e-12
    mask = torch.zeros_like(flat).scatter_(-1, order, kept.double())
    made = attention_map.provenance
    return replace(
        attention_map,
        values=mask.view_as(attention_map.values).float(),
        meaning="mask",
        signed=False,
        provenance=replace(made, parameters=made.parameters | {"mass": share}),
    )


def mask_of(
    attention_map: Any,  # noqa: ANN401
    share: Share,
    geometry: Geometry | None,
    interpolation: Interpolation,
) -> NDArray[np.bool_]:
    """Return the mask of pixels of an `AttentionMap`; see `AttentionMap.mask`."""
    geometry = geometry or attention_map.provenance.geometry
    if geometry is None:
        raise MapError("the map does not say where it lies on a photo. Pass the geometry of the photo: geometry=...")
    if share.kind == "mass" and attention_map.facts.interval:
        raise MapError(
            f"zero has no meaning of its own in {attention_map.meaning}, so a part of it holds no share of a sum. Use quantile."
        )
    heat = attention_map.to_heatmap(geometry, interpolation)
    top, left, bottom, right = (int(side) for side in heat.seen)
    mask = np.zeros(heat.values.shape, bool)
    for index in np.ndindex(heat.values.shape[:-2]):
        mask[index][top:bottom, left:right] = _largest(heat.values[index][top:bottom, left:right], share)
    return mask


def region_of(
    attention_map: Any,  # noqa: ANN401
    share: Share | str,
    geometry: Geometry | None,
    interpolation: Interpolation,
) -> Region:
    """Return the largest connected part of the mask of a share, or of its text; see `AttentionMap.box`."""
    share = share if isinstance(share, Share) else Share.read(share)
    if attention_map.axes:
        axes = ", ".join(attention_map.axes)
        how = worded("Choose one entry with at(), or take the mean.", "Choose another method.")
        raise MapError(f"a box is of one map, but this one has the axes {axes}. {how}")
    mask = mask_of(attention_map, share, geometry, interpolation)
    count, _, facts, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=4)
    areas = facts[1:, cv2.CC_STAT_AREA]
    if (equal := int((areas == areas.max()).sum())) > 1:
        raise MapError(
            f"{equal} parts of {share} have {areas.max()} pixels each, so none is the largest. Choose another share, or take the mask."
        )
    left, top, width, height = (int(side) for side in facts[1 + areas.argmax(), : cv2.CC_STAT_AREA])
    return Region(share, Box(top, left, top + height, left + width), count - 1)


def _largest(values: NDArray[np.float32], share: Share) -> NDArray[np.bool_]:
    """Return the pixels with the largest values; NaN marks pixels without one."""
    known = values[~np.isnan(values)].astype(np.float64)
    if not known.size:
        raise MapError("the model received no pixel of the photo that has a value, so there is no mask.")
    low, high = float(known.min()), float(known.max())
    near = _ROUNDING * max(abs(low), abs(high))
    if high - low <= near or nearly_even(low, high):
        raise MapError(f"the map is nearly even ({range_words(low, high)}): a mask would show noise as a place.")
    least = _least_of_mass(known, share.value) if share.kind == "mass" else float(np.quantile(known, share.value))
    if share.kind == "quantile" and least <= low + near:
        lowest = float((known <= low + near).mean())
        raise MapError(
            f"{lowest:.0%} of the pixels have the lowest value, {low:.3g}, which is also quantile {share.value:g}: a mask would be all "
            "that the model received. Choose a higher quantile, or use mass."
        )
    mask: NDArray[np.bool_] = values >= least - near  # False for NaN
    return mask & (values > 0) if share.kind == "mass" else mask


def _least_of_mass(known: NDArray[np.float64], mass: float) -> float:
    """Return the least value of the smallest set of pixels that holds the share of the sum of all positive values."""
    positive = np.sort(known[known > 0])[::-1]
    if not positive.size:
        raise MapError("no pixel of the map has a positive value, so nothing holds a share of their sum. Use quantile.")
    held = positive.cumsum()
    wanted = held[-1] if mass == 1 else held[-1] * (mass - _ROUNDING)
    return float(positive[np.searchsorted(held, wanted)])
