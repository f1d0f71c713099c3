"""Raw values of a method on the token grid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from visattn._support.checks import between, one_of
from visattn._support.faces import Later
from visattn._support.language import option
from visattn._support.reprs import brief
from visattn._support.types import Interpolation
from visattn.core.geometry import Geometry
from visattn.core.maps.map_facts import MapFacts
from visattn.core.provenance import Provenance, sink_warning
from visattn.core.records import TokenLayout
from visattn.errors import MapError, OptionError, ShapeError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from visattn.core.maps import heatmaps, interpolation as interpolations
else:
    interpolations, heatmaps = Later("visattn.core.maps.interpolation"), Later("visattn.core.maps.heatmaps")


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
        values: NDArray[Any] = self.values.detach().cpu().numpy()
        return values

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the raw values, for `numpy.asarray`."""
        return np.array(self.numpy(), dtype, copy=copy)

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
        parameters = self.provenance.parameters | {f"mean over {name}": int(self.values.shape[axis])}
        return self._without(axis, self.values.mean(axis), replace(self.provenance, parameters=parameters))

    def mass(self, share: float = 0.6) -> AttentionMap:
        """Return a 0/1 mask of the smallest set of cells that holds `share` of each grid's sum.

        This is the mask of DINO: values are divided by their sum over the patches and sorted, and the largest are kept until they
        hold `share`. Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021, arXiv:2104.14294.

        Raises:
            OptionError: If `share` is not in [0, 1].
            MapError: If values are negative or a grid is all zero.
        """
        between(share, 0, 1, "mass")
        flat = self.values.flatten(len(self.axes)).double().nan_to_num()  # holes count as 0
        total = flat.sum(-1, keepdim=True)
        if bool((flat < 0).any()) or not bool((total > 0).all()):
            low, high = float(flat.min()), float(flat.max())
            raise MapError(
                f"a mass mask needs grids of non-negative values with a positive sum, got {self.meaning} from {low:.4g} to {high:.4g}. "
                f"Use {option('contours')}."
            )
        ascending, order = (flat / total).sort(-1)
        kept = ascending.cumsum(-1) > 1 - share + 1e-12
        mask = torch.zeros_like(flat).scatter_(-1, order, kept.double())
        parameters = self.provenance.parameters | {"mass": share}
        return replace(
            self,
            values=mask.view_as(self.values).float(),
            meaning="mask",
            signed=False,
            provenance=replace(self.provenance, parameters=parameters),
        )

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
        one_of(interpolation, tuple(interpolations.KERNELS), "interpolation")
        if "batch" in self.axes:
            raise MapError("a heatmap shows one photo. Choose one image of the batch: map.at(batch=0).to_heatmap(...).")
        if len(self.layout.grid) != 2:
            raise MapError(f"a heatmap needs a grid of rows and columns, got {self.layout.grid}.")
        box, size = self.layout.box, self.facts.input_size
        if size is None:  # the map need not reach the edge: it lies within one patch of it
            patch = box.height / self.layout.grid[0], box.width / self.layout.grid[1]
            fits = abs(box.bottom - geometry.input[0]) < patch[0] and abs(box.right - geometry.input[1]) < patch[1]
        else:
            fits = size == geometry.input
        if not fits:
            made = " x ".join(f"{side:g}" for side in size or (box.bottom, box.right))
            given = " x ".join(map(str, geometry.input))
            raise MapError(
                f"the map was made for {made} input pixels, but the geometry has {given}. Pass the geometry of this photo."
            )
        grid = self.values.detach().float().cpu().numpy()
        seen = geometry.seen(box)
        top, left, bottom, right = (int(side) for side in seen)
        values = np.zeros((*grid.shape[:-2], *geometry.photo), np.float32)
        values[..., top:bottom, left:right] = interpolations.resampled(grid, geometry, box, seen, interpolation)
        sinks = self.facts.sinks[0] if len(self.facts.sinks) == 1 else ()
        centers = (geometry.patch_box(sink.row, sink.column, (self.layout.grid[0], self.layout.grid[1]), box) for sink in sinks)
        return heatmaps.Heatmap(
            values,
            self.axes,
            seen,
            self.meaning,
            replace(
                self.provenance,
                geometry=geometry,
                parameters=self.provenance.parameters | {"interpolation": interpolation},
            ),
            grid,
            dict(self.labels),
            tuple(((c.top + c.bottom) / 2, (c.left + c.right) / 2) for c in centers),
            tuple(geometry.to_photo(y, x) for y, x in self.facts.query_at),
            self.signed,
        )

    def _axis(self, name: str) -> int:
        return self.axes.index(one_of(name, self.axes, "axis"))

    def _without(self, axis: int, values: Tensor, provenance: Provenance) -> AttentionMap:
        name = self.axes[axis]
        labels = {key: value for key, value in self.labels.items() if key != name}
        return replace(self, values=values, axes=self.axes[:axis] + self.axes[axis + 1 :], labels=labels, provenance=provenance)
