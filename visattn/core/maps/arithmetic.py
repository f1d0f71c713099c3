"""Arithmetic on maps: their mean, and the difference of two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np
import torch

from visattn._support.checks import one_of, shown
from visattn._support.language import option, worded
from visattn._support.reprs import in_pixels
from visattn._support.typed import typed
from visattn.core.geometry import Box, Geometry
from visattn.core.maps.attention_maps import AttentionMap
from visattn.core.maps.map_facts import MapFacts
from visattn.core.provenance import Provenance
from visattn.errors import MapError, OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SCALES", "MapScale", "MapSum", "check_alike", "frame_of", "on_own_mean", "shared_facts"]

MapScale = Literal["relative", "raw"]
_T = TypeVar("_T", Provenance, MapFacts)
_FRAME = "the model's input, whatever part of each photo it holds"
_SCALE = "scale of maps"  # parameter in the provenance
_RELATIVE = "relative "  # in the meaning of a map on this scale
_DIGITS = 64  # of a SHA-256 digest
SCALES = {"relative": "multiples of each map's mean magnitude", "raw": "raw values"}


@dataclass(frozen=True, eq=False)
class MapSum:
    """Sum of maps of one grid, cell by cell. It takes the memory of one map, however many are added.

    Attributes:
        like: What all maps share; its values are zero, and its layout has no holes.
        total: `(*axes, rows, columns)` sums.
        counts: `(rows, columns)` number of maps with a value in each cell that lies on their photo.
        maps: Number of maps.
        empty: Number of further maps that are zero everywhere, which have no relative scale and are left out.
        scale: Scale of each map, see `mean_map`.
        digest: Sum of the SHA-256 digests of the photos, modulo 2^256; empty if one is unknown.
    """

    like: AttentionMap
    total: NDArray[np.float64]
    counts: NDArray[np.int64]
    maps: int
    empty: int
    scale: MapScale
    digest: str

    @classmethod
    def of(cls, one: AttentionMap, scale: MapScale = "relative") -> MapSum:
        """Return the sum of a single map; see `mean_map`."""
        one_of(scale, get_args(MapScale), "scale")
        _check_one(one)
        counted = _counted(one)
        values = np.where(counted, one.values.detach().double().cpu().nan_to_num().numpy(), 0.0)
        if scale == "relative":
            values = _relative(one, values, counted)
        empty = scale == "relative" and _RELATIVE not in one.meaning and not values.any()
        layout = replace(one.layout, holes=())
        like = replace(one, values=torch.zeros(values.shape), layout=layout, meaning=_quantity(one, scale))
        counts = (counted & (not empty)).astype(np.int64)
        return cls(like, values, counts, int(not empty), int(empty), scale, one.provenance.image_sha256 or "")

    def plus(self, other: MapSum) -> MapSum:
        """Return the sum of both.

        Raises:
            MapError: If their maps differ in axes, grid, input, quantity or scale.
        """
        if self.scale != other.scale:
            raise MapError(f"sums of {SCALES[self.scale]} and of {SCALES[other.scale]} cannot be added. Use one scale.")
        check_alike(self.like, other.like)
        _check_quantity(self.like, other.like)
        one, two = self.like, other.like
        like = replace(
            one,
            provenance=shared_facts(one.provenance, two.provenance),
            facts=shared_facts(one.facts, two.facts),
            signed=one.signed or two.signed,
        )
        known = self.digest and other.digest
        digest = f"{(int(self.digest, 16) + int(other.digest, 16)) % 16**_DIGITS:0{_DIGITS}x}" if known else ""
        total, counts = self.total + other.total, self.counts + other.counts
        return MapSum(like, total, counts, self.maps + other.maps, self.empty + other.empty, self.scale, digest)

    def mean(self) -> AttentionMap:
        """Return the mean of the maps in each cell over those that have a value there; a cell without one is a hole.

        Raises:
            MapError: If no map has a value.
        """
        if not self.counts.any():
            raise MapError(f"all of {self.empty} maps are zero everywhere, so they have no mean.")
        values = torch.from_numpy((self.total / np.maximum(self.counts, 1)).astype(np.float32))
        holes = tuple(np.flatnonzero(self.counts.ravel() == 0).tolist())
        made, of = self.like.provenance, f"{self.maps} maps"
        if made.image_sha256 is None or made.geometry is None:
            made = made.but(image=f"the mean of {of}", image_sha256=self.digest or None, geometry=frame_of(self.like))
        notes = [f"mean of {of}, {SCALES[self.scale]}, in the frame of the model's input"]
        if self.empty:
            notes.append(f"{self.empty} more maps are left out, as they are zero everywhere")
        if len(some := np.unique(self.counts)) > 1:
            notes.append(f"cells have {some[0]} to {some[-1]} maps, as parts of the input lie beside a photo or have no token")
        made = made.but(parameters=made.parameters | {"mean of maps": self.maps, _SCALE: self.scale}, notes=tuple(notes))
        return replace(self.like, values=values, layout=replace(self.like.layout, holes=holes), provenance=made)


@typed(but=("maps",))
def mean_map(maps: Iterable[AttentionMap], scale: MapScale = "relative") -> AttentionMap:
    """Return the mean of maps of one model's input, such as those of many photos.

    Cells are averaged in the frame of the model's input, whatever part of each photo it holds. Cells whose center lies beside the photo,
    and cells whose token was dropped, do not count.

    Args:
        maps: The maps. They are read one after another, and not kept.
        scale: `relative` divides each map by the mean of its magnitudes, so each counts alike, and 1 is the value of an even map. Maps that
            are zero everywhere are then left out, and a note says how many. `raw` takes the values as they are, so maps with large values
            count more.

    Returns:
        The mean, whose meaning begins with "relative" on that scale. Its provenance holds what all maps share, their number and the scale.

    Raises:
        OptionError: If something else than maps is given, or the scale is unknown.
        MapError: If there is no map, maps differ in axes, grid, input or quantity, one has a batch axis or principal components, zero has
            no meaning in them (`relative`), or all are zero everywhere.
    """
    if isinstance(maps, AttentionMap) or not isinstance(maps, Iterable):
        raise OptionError(f"maps must be several, such as a list, got {shown(maps)}.")
    sums = (MapSum.of(one, scale) for one in maps)
    first = next(sums, None)
    if first is None:
        raise MapError("a mean needs at least one map, got none.")
    return reduce(MapSum.plus, sums, first).mean()


@typed(but=("one", "other"))
def difference(one: AttentionMap, other: AttentionMap, scale: MapScale = "relative") -> AttentionMap:
    """Return one map minus another at the same place, cell by cell, as a signed map.

    Args:
        one: The map.
        other: The map that is subtracted, over the same part of the same photo, or of the same frame.
        scale: See `mean_map`.

    Returns:
        The difference; cells without a value in either map, or beside the photo, are holes.

    Raises:
        MapError: If the maps differ in axes, grid, input or place on the photo, one has a batch axis or principal components, zero has
            no meaning in them or one is zero everywhere (`relative`), or they are of different quantities (`raw`).
    """
    for each in (one, other):
        _check_one(each)
    check_alike(one, other)
    if scale == "raw":
        _check_quantity(one, other)
    made, taken = one.provenance, other.provenance
    if made.geometry != taken.geometry:
        raise MapError(
            "the maps lie at different places of a photo, so their cells do not correspond. Explain both with the same photo, resize and "
            "img_size."
        )
    sums = [MapSum.of(each, scale) for each in (one, other)]
    if any(each.empty for each in sums):
        raise MapError("one of the maps is zero everywhere, so it has no relative scale. Use scale='raw'.")
    first, second = (each.like.meaning for each in sums)
    holes = tuple(np.flatnonzero(sums[0].counts * sums[1].counts == 0).tolist())
    names: dict[str, Any] = {name: _minus(getattr(made, name), getattr(taken, name)) for name in ("model", "method", "image")}
    record = shared_facts(made, taken)
    record = record.but(**names, parameters=record.parameters | {_SCALE: scale}, notes=(f"difference, {SCALES[scale]}",))
    return replace(
        one,
        values=torch.from_numpy((sums[0].total - sums[1].total).astype(np.float32)),
        layout=replace(one.layout, holes=holes),
        meaning=f"difference of {first}" if first == second else f"{first} minus {second}",
        provenance=record,
        signed=True,
        facts=shared_facts(one.facts, other.facts),
    )


def on_own_mean(one: AttentionMap) -> AttentionMap:
    """Return a map in multiples of the mean of its magnitudes.

    A map that is zero everywhere stays so, and so does a mean or a difference of maps that are on this scale.
    """
    _check_one(one)
    scaled = _relative(one, one.values.detach().double().cpu().numpy(), _counted(one))
    return replace(one, values=torch.from_numpy(scaled.astype(np.float32)), meaning=_quantity(one, "relative"))


def frame_of(one: AttentionMap) -> Geometry:
    """Return the geometry of a picture that is the model's input itself."""
    size = one.facts.input_size or (round(one.layout.box.bottom), round(one.layout.box.right))
    return Geometry(size, size, Box(0, 0, *size), _FRAME)


def shared_facts(one: _T, other: _T) -> _T:
    """Return what two records of facts share: equal fields, and equal entries of dictionaries, notes and warnings.

    If the weights of one are random, those of both are said to be.
    """
    found: dict[str, Any] = {}
    for field in fields(one):
        here, there = getattr(one, field.name), getattr(other, field.name)
        if isinstance(here, dict):
            found[field.name] = {key: value for key, value in here.items() if key in there and there[key] == value}
        elif field.name in ("notes", "warnings"):
            found[field.name] = tuple(text for text in here if text in there)
        elif field.name == "random":
            found[field.name] = here or there
        elif here != there:
            found[field.name] = field.default if field.default is not MISSING else None
    return replace(one, **found)


def check_alike(one: AttentionMap, other: AttentionMap) -> None:
    """Check that the cells of two maps correspond.

    Raises:
        MapError: If they differ in axes, grid or input.
    """
    first, second = _frame_words(one), _frame_words(other)
    if first != second:
        raise MapError(
            f"one map has {first}, another {second}, so their cells do not correspond. Give all photos one input: "
            f"{option('resize', 'model')}."
        )


def _check_one(one: AttentionMap) -> None:
    if not isinstance(one, AttentionMap):
        raise OptionError(f"a map must be an AttentionMap, such as explanation.map, got {shown(one)}.")
    if "batch" in one.axes:
        raise MapError("a map with a batch axis is of several photos. Choose each one: map.at(batch=0).")
    if len(one.layout.grid) != 2:
        raise MapError(f"a map must have a grid of rows and columns, got {one.layout.grid}.")
    if one.meaning == "principal component":
        raise MapError(
            "the sign of a principal component is arbitrary, so components of different photos have no mean or difference."
        )


def _check_quantity(one: AttentionMap, other: AttentionMap) -> None:
    if one.meaning != other.meaning:
        raise MapError(f"the maps are of different quantities, {one.meaning} and {other.meaning}. Take maps of one method.")


def _relative(one: AttentionMap, values: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    if one.facts.interval:
        raise MapError(
            f"zero has no meaning of its own in {one.meaning}, so it has no relative scale. "
            + worded("Use scale='raw'.", "Use another method.")
        )
    if _RELATIVE in one.meaning:
        return values
    mean = float(np.abs(values[..., counted]).mean()) if counted.any() else 0.0
    return values / mean if mean else values


def _quantity(one: AttentionMap, scale: MapScale) -> str:
    """Return the meaning of a map's values on a scale."""
    return one.meaning if scale == "raw" or _RELATIVE in one.meaning else f"{_RELATIVE}{one.meaning}"


def _holes(one: AttentionMap) -> NDArray[np.bool_]:
    """Return `(rows, columns)`: true where the model dropped the token."""
    holes = np.zeros(one.layout.grid, bool)
    holes.ravel()[list(one.layout.holes)] = True
    return holes


def _counted(one: AttentionMap) -> NDArray[np.bool_]:
    """Return `(rows, columns)`: true where a cell has a value and its center lies on the photo, if the photo's place is known."""
    place, box = one.provenance.geometry, one.layout.box
    if place is None:
        return ~_holes(one)
    starts, extents = (box.top, box.left), (box.height, box.width)
    inside = []
    for axis, cells in enumerate(one.layout.grid):
        centers = starts[axis] + (np.arange(cells) + 0.5) / cells * extents[axis]
        on_photo = place.window[axis] + centers * place.scale[axis]
        inside.append((on_photo >= 0) & (on_photo < place.photo[axis]))
    return np.outer(*inside) & ~_holes(one)


def _frame_words(one: AttentionMap) -> str:
    top, left, bottom, right = one.layout.box
    size = in_pixels(one.facts.input_size) if one.facts.input_size else "unknown size"
    axes = "".join(f", {name} {count}" for name, count in zip(one.axes, one.values.shape, strict=False))
    cells = " x ".join(map(str, one.layout.grid))
    return f"{cells} cells over y {top:g} to {bottom:g}, x {left:g} to {right:g} of an input of {size}{axes}"


def _minus(one: str | None, other: str | None) -> str | None:
    return one if one == other else f"{one} minus {other}"
