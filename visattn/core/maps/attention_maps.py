"""Raw values of a method on the token grid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from visattn._support.checks import one_of
from visattn._support.faces import Later
from visattn._support.reprs import brief
from visattn._support.types import Interpolation
from visattn.core.geometry import Box, Geometry
from visattn.core.maps.map_facts import MapFacts
from visattn.core.offers import offered
from visattn.core.provenance import Provenance, sink_warning
from visattn.core.records import TokenLayout
from visattn.errors import MapError, OptionError, ShapeError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from visattn.core.maps import heatmaps, interpolation as interpolations, regions
else:
    interpolations, regions = Later("visattn.core.maps.interpolation"), Later("visattn.core.maps.regions")


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Raw values on the token grid.

    Attributes:
        values: `(*axes, rows, columns)` raw values, never min-max scaled. NaN in the holes of the layout, and nowhere else.
        axes: Names of the leading dimensions: some of `batch`, `layer`, `head`, `component`, `object`, `word` and `frame`.
        layout: Position of the grid in the model's input.
        labels: Names of the entries of an axis, if they have names.
        meaning: Quantity of the values, such as `attention`, `rollout`, `cosine similarity`, `principal component`, `glimpses` or
            `mask`.
        provenance: Origin of the map.
        signed: Whether the map needs a diverging color scale centered on zero. The method decides; a map with negative values is
            always signed.
        facts: Further facts about the map: its layer, query token, sinks and glimpses.
    """

    values: Tensor
    axes: tuple[str, ...]
    layout: TokenLayout
    labels: Mapping[str, tuple[str, ...]]
    meaning: str
    provenance: Provenance = field(default_factory=Provenance)
    signed: bool = False
    facts: MapFacts = field(default_factory=MapFacts)

    __repr__ = brief

    def __post_init__(self) -> None:
        """Check the shape and that every value is finite.

        Raises:
            ShapeError: If `values` is not `(*axes, *grid)`, or the grid has no cell.
            MapError: If a value is NaN or infinite.
        """
        expected = len(self.axes) + len(self.layout.grid)
        if self.values.ndim != expected or tuple(self.values.shape[len(self.axes) :]) != self.layout.grid:
            raise ShapeError(f"values must be {self.axes} + grid {self.layout.grid}, got {tuple(self.values.shape)}.")
        if 0 in self.layout.grid:
            raise ShapeError(f"a map must have at least one cell, got the grid {self.layout.grid}.")
        holes = list(self.layout.holes)
        if holes:
            flat = self.values.flatten(len(self.axes)).index_fill(-1, torch.tensor(holes, device=self.values.device), math.nan)
            object.__setattr__(self, "values", flat.view(self.values.shape))
        if bad := int((~self.values.isfinite()).sum()) - math.prod(self.values.shape[: len(self.axes)]) * len(holes):
            raise MapError(
                f"{bad} of {self.values.numel()} map values are NaN or infinite. Check the weights, the input and the target that give "
                "them."
            )
        below = not self.facts.interval and bool((self.values < 0).any())
        object.__setattr__(self, "signed", self.signed or below)

    def numpy(self) -> NDArray[Any]:
        """Return the raw values as an array, `(*axes, rows, columns)`."""
        return self.values.detach().cpu().numpy()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the raw values, for `numpy.asarray`."""
        return np.array(self.numpy(), dtype, copy=copy)

    def _repr_png_(self) -> bytes | None:
        """Return the colors of the map for notebooks, the mean over its heads and layers; None if it has no such picture."""
        return offered("notebook", "map")(self)

    def at(self, **index: int) -> AttentionMap:
        """Select one entry of each named axis, as in `map.at(batch=0, head=3)`.

        Raises:
            OptionError: If an axis or entry does not exist.
        """
        result = self
        for name, i in index.items():
            axis = result._axis(name)
            size = result.values.shape[axis]
            if not -size <= i < size:
                raise OptionError(f"{name} must lie in [{-size}, {size - 1}], got {i}.")
            one = result._of_image(i) if name == "batch" else result._entry(name, i % size)
            result = one._without(axis, one.values.select(axis, i), one.provenance)
        return result

    def _entry(self, name: str, i: int) -> AttentionMap:
        """Name the chosen entry of an axis in facts and provenance, but keep the values."""
        text = self.labels[name][i] if name in self.labels else str(i)
        made = self.provenance.parameters | {name: int(text) if text.isdigit() else text}
        facts = replace(self.facts, layer=text) if name == "layer" else self.facts
        return replace(self, facts=facts, provenance=replace(self.provenance, parameters=made))

    def _of_image(self, image: int) -> AttentionMap:
        """Restrict facts and provenance to one image of the batch, but not the values."""
        facts, made = self.facts.of_image(image), self.provenance
        warned = sink_warning(facts.sinks[0]) if facts.sinks and facts.sinks_kept else ()
        targets, scores = (one[image : image + 1] if len(one) > 1 else one for one in (made.target, made.scores))
        made = made.but(
            sinks=facts.sinks, warnings=warned, target=targets, scores=scores, parameters=made.parameters | facts.path()
        )
        return replace(self, facts=facts, provenance=made)

    def mean(self, name: str) -> AttentionMap:
        """Return the mean over one axis.

        Raises:
            OptionError: If the axis does not exist.
        """
        axis = self._axis(name)
        parameters = self.provenance.parameters | {f"mean over {self.values.shape[axis]} {name}s": True}
        return self._without(axis, self.values.mean(axis), replace(self.provenance, parameters=parameters))

    def mass(self, share: float = 0.6) -> AttentionMap:
        """Return a 0/1 mask of the smallest set of cells that holds `share` of each grid's sum.

        This is the mask of DINO: values are divided by their sum over the patches and sorted, and the largest are kept until they
        hold `share`. Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021, arXiv:2104.14294.

        Raises:
            OptionError: If `share` is not in [0, 1].
            MapError: If values are negative or a grid is all zero.
        """
        mask: AttentionMap = regions.mass_of(self, share)
        return mask

    def mask(
        self,
        *,
        mass: float | None = None,
        quantile: float | None = None,
        geometry: Geometry | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> NDArray[np.bool_]:
        """Return the photo's pixels with the largest values, as `to_heatmap` interpolates them. Give either `mass` or `quantile`.

        Pixels that the model did not receive, or whose token it dropped, are never in the mask. Values that are equal up to a millionth of
        the largest are in it together.

        Args:
            mass: The fewest pixels that hold this share of the sum. Negative values count as 0. Above 0, at most 1.
            quantile: The pixels at or above this quantile of all pixels that have a value. Above 0, at most 1.
            geometry: Position of the model's input on the photo; by default that in the provenance.
            interpolation: See `to_heatmap`.

        Returns:
            A mask `(*axes, height, width)` of the upright photo.

        Raises:
            OptionError: If a share is out of range, or none or both are given.
            MapError: If the map is nearly even; if zero has no meaning in it or no value is positive, for a mass; if the quantile is the
                lowest value; or if `to_heatmap` refuses the map.
        """
        return regions.mask_of(self, regions.Share.of(mass, quantile), geometry, interpolation)

    def box(
        self,
        *,
        mass: float | None = None,
        quantile: float | None = None,
        geometry: Geometry | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> Box:
        """Return the bounding box `(top, left, bottom, right)` of the largest part of the `mask` that is connected along sides of pixels.

        Its sides are edges of pixels: `mask[top:bottom, left:right]` holds the part. Options and errors are those of `mask`. A `MapError`
        also refuses a map with axes, and two parts that are equally large.
        """
        return regions.region_of(self, regions.Share.of(mass, quantile), geometry, interpolation).box

    def to_heatmap(self, geometry: Geometry, interpolation: Interpolation = "bilinear") -> heatmaps.Heatmap:
        """Interpolate the map to the photo's own pixels.

        The center of each photo pixel is mapped to the grid, and the cells around it are interpolated (half-pixel centers, edges
        extended). Pixels that the model did not receive are 0 and lie outside `seen`. Pixels under a cell whose token the model
        dropped are NaN; pixels beside such a cell are interpolated from the remaining cells.

        Args:
            geometry: Position of the model's input on the photo.
            interpolation: `bilinear`, `nearest` (shows the cells) or `bicubic` (clipped to the range of the grid's values).

        Returns:
            A heatmap of shape `(*axes, height, width)`.

        Raises:
            OptionError: If the interpolation is unknown.
            MapError: If the map has a batch axis, has no 2D grid, or was made for an input of another size.
        """
        return interpolations.heatmap_of(self, geometry, interpolation)

    def _axis(self, name: str) -> int:
        return self.axes.index(one_of(name, self.axes, "axis"))

    def _without(self, axis: int, values: Tensor, provenance: Provenance) -> AttentionMap:
        name = self.axes[axis]
        labels = {key: value for key, value in self.labels.items() if key != name}
        return replace(self, values=values, axes=self.axes[:axis] + self.axes[axis + 1 :], labels=labels, provenance=provenance)
