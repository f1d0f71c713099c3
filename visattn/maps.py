"""Values on the token grid, and the same values in the photo's own pixels.

In: what a method computed, raw. Out: `AttentionMap` (on the grid) and `Heatmap` (in pixels). Nothing is scaled to [0, 1] here
except by `normalize`, which writes down how it did it.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from visattn import _map_file
from visattn._resample import KERNELS, resampled
from visattn._support.checks import between, one_of, printable
from visattn._support.types import Interpolation, Normalization
from visattn.errors import MapError, OptionError, ShapeError
from visattn.geometry import Box, Geometry
from visattn.provenance import Provenance, sink_warning
from visattn.records import TokenLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PERCENTILE = (1.0, 99.0)


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Raw values on the token grid.

    Attributes:
        values: `(*axes, rows, columns)`; never min-max scaled. NaN in the holes of the layout, and nowhere else.
        axes: Names of the leading dimensions, of `batch layer head component object word frame`.
        layout: Where the grid lies in the model's input.
        labels: Names of the entries of an axis, where they have any.
        meaning: What a value is: `attention`, `rollout`, `cosine similarity`, `principal component`, `glimpses`, `mask`.
        provenance: How the map was made.
        signed: Whether zero is a value of its own, from which colors diverge. The method says so; a map with a value below zero is
            signed whatever was said, so that zero never has a color from the middle of a sequential scale.
    """

    values: Tensor
    axes: tuple[str, ...]
    layout: TokenLayout
    labels: Mapping[str, tuple[str, ...]]
    meaning: str
    provenance: Provenance = field(default_factory=Provenance)
    signed: bool = False

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
            raise ShapeError(f"a map must have a cell at least, got the grid {self.layout.grid}.")
        holes = list(self.layout.holes)
        if holes:
            flat = self.values.flatten(len(self.axes)).index_fill(-1, torch.tensor(holes, device=self.values.device), math.nan)
            object.__setattr__(self, "values", flat.view(self.values.shape))
        if bad := int((~self.values.isfinite()).sum()) - math.prod(self.values.shape[: len(self.axes)]) * len(holes):
            raise MapError(f"{bad} of {self.values.numel()} map values are NaN or infinite. Check the model's weights and input.")
        object.__setattr__(self, "signed", self.signed or bool((self.values < 0).any()))

    def at(self, **index: int) -> AttentionMap:
        """One entry of each named axis: `map.at(batch=0, head=3)`.

        Raises:
            OptionError: If there is no such axis or entry.
        """
        result = self
        for name, i in index.items():
            axis = result._axis(name)
            size = result.values.shape[axis]
            if not -size <= i < size:
                raise OptionError(f"{name} must lie in [{-size}, {size - 1}], got {i}.")
            provenance = result.provenance
            if name == "batch" and provenance.sinks:
                found = provenance.sinks[i]
                kept = provenance.parameters.get("sinks", "keep") == "keep"
                provenance = provenance.but(sinks=(found,), warnings=sink_warning(found) if kept else ())
            if name == "batch" and len(provenance.target) > 1:
                provenance = provenance.but(target=(provenance.target[i],))
            if name == "batch" and "path" in provenance.parameters:
                provenance = replace(provenance, parameters=provenance.parameters | {"path": provenance.parameters["path"][i]})
            result = result._without(axis, result.values.select(axis, i), provenance)
        return result

    def mean(self, name: str) -> AttentionMap:
        """The mean over one axis.

        Raises:
            OptionError: If there is no such axis.
        """
        axis = self._axis(name)
        parameters = self.provenance.parameters | {f"mean over {name}": int(self.values.shape[axis])}
        return self._without(axis, self.values.mean(axis), replace(self.provenance, parameters=parameters))

    def mass(self, share: float = 0.6) -> AttentionMap:
        """The smallest set of cells that holds `share` of each grid's sum, as 0 and 1.

        The mask of DINO: values are divided by their sum over the patches, sorted, and the largest are kept until they hold
        `share`. Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021, arXiv:2104.14294.

        Raises:
            OptionError: If `share` is not in [0, 1].
            MapError: If values are negative, or a grid is all zero: it has no mass to share.
        """
        between(share, 0, 1, "mass")
        flat = self.values.flatten(len(self.axes)).double().nan_to_num()  # holes have no mass
        total = flat.sum(-1, keepdim=True)
        if bool((flat < 0).any()) or not bool((total > 0).all()):
            raise MapError(f"a mass mask needs non-negative values with a positive sum; {self.meaning} has none. Use contours.")
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

    def to_heatmap(self, geometry: Geometry, interpolation: Interpolation = "bilinear") -> Heatmap:
        """The map in the photo's own pixels.

        Each photo pixel's centre is carried to the grid and the cells around it are mixed (half-pixel centres, edges
        extended). Pixels that the model did not see are 0 and lie outside `seen`. Pixels under a cell whose token the model dropped
        are NaN; others mix the cells that there are.

        Args:
            geometry: Where the model's input lies on the photo.
            interpolation: `bilinear`; `nearest` shows the cells; `bicubic` is clipped to the grid's own range.

        Returns:
            A heatmap of shape `(*axes, height, width)`.

        Raises:
            OptionError: If the interpolation is unknown.
            MapError: If the map is not of one image, or made for an input of another size.
        """
        one_of(interpolation, tuple(KERNELS), "interpolation")
        if "batch" in self.axes:
            raise MapError("a heatmap is of one photo. Choose one image of the batch: map.at(batch=0).to_heatmap(...).")
        if len(self.layout.grid) != 2:
            raise MapError(f"a heatmap needs a grid of rows and columns, got {self.layout.grid}.")
        box = self.layout.box
        patch = box.height / self.layout.grid[0], box.width / self.layout.grid[1]
        if abs(box.bottom - geometry.input[0]) >= patch[0] or abs(box.right - geometry.input[1]) >= patch[1]:
            size = " x ".join(map(str, geometry.input))
            raise MapError(
                f"the map covers {box.bottom:g} x {box.right:g} input pixels, the geometry {size}. Use the photo's own."
            )
        grid = self.values.detach().float().cpu().numpy()
        seen = geometry.seen(box)
        top, left, bottom, right = (int(side) for side in seen)
        values = np.zeros((*grid.shape[:-2], *geometry.photo), np.float32)
        values[..., top:bottom, left:right] = resampled(grid, geometry, box, seen, interpolation)
        sinks = self.provenance.sinks[0] if len(self.provenance.sinks) == 1 else ()
        centres = (geometry.patch_box(sink.row, sink.column, (self.layout.grid[0], self.layout.grid[1]), box) for sink in sinks)
        return Heatmap(
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
            tuple(((c.top + c.bottom) / 2, (c.left + c.right) / 2) for c in centres),
            self.signed,
        )

    def _axis(self, name: str) -> int:
        return self.axes.index(one_of(name, self.axes, "axis"))

    def _without(self, axis: int, values: Tensor, provenance: Provenance) -> AttentionMap:
        name = self.axes[axis]
        labels = {key: value for key, value in self.labels.items() if key != name}
        return replace(self, values=values, axes=self.axes[:axis] + self.axes[axis + 1 :], labels=labels, provenance=provenance)


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

    @property
    def normalized(self) -> bool:
        """Whether `normalize` has scaled the values to [0, 1] already."""
        return self.provenance.normalization is not None

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
    one_of(how, ("auto", "minmax", "none", "percentile", "symmetric"), "normalization")
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
    return replace(heat, values=values, grid=grid, provenance=provenance, signed=heat.signed or how == "symmetric")


def save_map(attention_map: AttentionMap, geometry: Geometry) -> bytes:
    """A map and its geometry as the content of an `.npz` file, for `load_map`."""
    layout = attention_map.layout
    facts = {
        "axes": attention_map.axes,
        "layout": {"space": layout.space, "prefix": layout.prefix, "grid": layout.grid, "box": layout.box, "holes": layout.holes},
        "labels": dict(attention_map.labels),
        "meaning": attention_map.meaning,
        "signed": attention_map.signed,
        "provenance": replace(attention_map.provenance, geometry=geometry).to_dict(),
    }
    stream = io.BytesIO()
    np.savez_compressed(stream, values=attention_map.values.detach().float().cpu().numpy(), facts=np.array(json.dumps(facts)))
    return stream.getvalue()


def load_map(path: str | os.PathLike[str]) -> tuple[AttentionMap, Geometry] | NDArray[np.float32]:
    """A map saved by `save_map`, or a plain `.npy` array `(height, width)`.

    Args:
        path: An `.npz` or `.npy` file; nothing in it is ever run.

    Returns:
        The map with its geometry, or the array.

    Raises:
        MapError: If the file is neither, or holds what no map has.
    """
    name = printable(os.fspath(path))
    try:
        read = _map_file.read(Path(path))
        if isinstance(read, np.ndarray):
            return read
        facts, values = read
        provenance = Provenance.from_dict(facts["provenance"])
        parts = facts["layout"]
        layout = TokenLayout(
            parts["space"], tuple(parts["prefix"]), tuple(parts["grid"]), Box(*parts["box"]), tuple(parts.get("holes", ()))
        )
        labels = {key: tuple(value) for key, value in facts["labels"].items()}
        signed = bool(facts.get("signed", False))  # files of older versions do not say; values below zero do
        geometry = provenance.geometry
        if geometry is None:
            raise MapError(f"{name}: the map has no geometry. Save it with visattn.maps.save_map (--save-map).")
        made = AttentionMap(torch.from_numpy(values), tuple(facts["axes"]), layout, labels, facts["meaning"], provenance, signed)
        return made, geometry
    except MapError:
        raise
    except Exception as error:  # numpy, zip and JSON raise many kinds on damaged files
        raise MapError(
            f"{name}: not a map ({printable(str(error))[:120]}); make one with visattn.maps.save_map (--save-map), or pass an .npy array."
        ) from error
