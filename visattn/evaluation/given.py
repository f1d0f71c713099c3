"""Inputs of the scores: maps, explanations and arrays, and masks of truth values or of the numbers of an image file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from visattn._support.checks import shown as brief_of
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap
from visattn.core.pipeline.explanation import Explanation
from visattn.core.provenance import Provenance
from visattn.core.records import TokenLayout
from visattn.errors import OptionError, ShapeError

MapLike: TypeAlias = AttentionMap | Explanation | Tensor | NDArray[Any] | list[Any]
MaskLike: TypeAlias = NDArray[Any] | Tensor | Image.Image

ARRAY = "array"  # token set of a map that is made of an array, which covers the whole image
_PAIRS = ({0, 1}, {0, 255})  # numbers of a mask that is no boolean


def as_map(shown: MapLike) -> AttentionMap:
    """Return a map, that of an explanation, or an array as a map of a whole image.

    Args:
        shown: The map; an array is `(rows, columns)`, with axes of size 1 before, or `(1, C, rows, columns)`: attributions of one input to
            all its numbers, as captum gives them, which are summed over channels. It may stand alone in a list, as torch-cam gives it.

    Raises:
        ShapeError: If it is no map, or an array with other axes or without numbers.
    """
    if isinstance(shown, AttentionMap):
        return shown
    if isinstance(shown, Explanation):
        return shown.map
    if isinstance(shown, list) and len(shown) == 1:
        return as_map(shown[0])
    try:
        values, notes = torch.as_tensor(shown), tuple[str, ...]()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"a map must be an AttentionMap, an explanation or an array, got {brief_of(shown)}.") from error
    if values.ndim == 4 and len(values) == 1 and values.shape[1] > 1:
        values, notes = values.sum(1), (f"sum of attributions over {values.shape[1]} channels",)
    while values.ndim > 2 and len(values) == 1:
        values = values[0]
    if values.ndim != 2 or not values.numel() or values.is_complex():
        raise ShapeError(
            "an array must be numbers (rows, columns), (1, rows, columns), or attributions of one input (1, C, rows, columns); "
            f"got {values.dtype} {tuple(values.shape)}."
        )
    layout = TokenLayout(ARRAY, (), tuple(values.shape), Box(0, 0, *values.shape))
    provenance = Provenance(notes=notes)
    return AttentionMap(values.detach().double(), (), layout, {}, "array", provenance, signed=bool((values < 0).any()))


def one_map(shown: MapLike) -> AttentionMap:
    """Return a map, see `as_map`; of an explanation the mean over its heads and layers."""
    return shown.panel if isinstance(shown, Explanation) else as_map(shown)


def on_input(shown: MapLike, geometry: Geometry) -> AttentionMap:
    """Return one map with its place on the photo. An array, an unplaced map of a file too, covers the whole input of the model."""
    found = one_map(shown)
    layout = replace(found.layout, box=Box(0, 0, *geometry.input)) if found.layout.space == ARRAY else found.layout
    return replace(found, layout=layout, provenance=found.provenance.but(geometry=geometry))


def given(shown: MapLike, mask: MaskLike, geometry: Geometry | None) -> tuple[AttentionMap, NDArray[np.bool_], Geometry]:
    """Return a map, a boolean mask, and the position of the map on the photo.

    Args:
        shown: A map, an explanation, or an array `(rows, columns)`.
        mask: `(height, width)`: booleans, 0 and 1, or 0 and 255; an array or a picture in one channel.
        geometry: Position of the model's input on the photo. None: that of the explanation, or that in the provenance of the map; an array
            then covers the whole photo.

    Raises:
        OptionError: If the position is not known, or an explanation is given another one.
        ShapeError: If the array has other axes, or the mask other numbers.
    """
    found, truth = as_map(shown), as_mask(mask)
    if isinstance(shown, Explanation) and geometry not in (None, shown.geometry):
        raise OptionError("an explanation has its own geometry. Leave geometry out.")
    if not isinstance(shown, (AttentionMap, Explanation)):
        geometry = geometry or Geometry(truth.shape, found.layout.grid, Box(0, 0, *truth.shape), "the whole photo")  # type: ignore[arg-type]
        found = replace(found, layout=replace(found.layout, box=Box(0, 0, *geometry.input)))
    known = shown.geometry if isinstance(shown, Explanation) else geometry or found.provenance.geometry
    if known is None:
        raise OptionError("geometry is missing, and the map's provenance has none. Pass the geometry of the explanation.")
    return found, truth, known


def as_mask(mask: MaskLike) -> NDArray[np.bool_]:
    """Return a mask as booleans.

    Raises:
        ShapeError: If it holds other numbers than 0 and 1, or 0 and 255.
    """
    array = mask.cpu().numpy() if isinstance(mask, Tensor) else np.asarray(mask)
    if array.dtype == np.bool_:
        return array
    held = set(np.unique(array)[:9].tolist()) if array.dtype.kind in "uif" else {None}
    if not any(held <= pair for pair in _PAIRS):
        raise ShapeError(
            "the mask must be boolean, or hold 0 and 1, or 0 and 255; "
            f"got {array.dtype} {array.shape} with {', '.join(map(str, sorted(held, key=str)[:4]))}."
        )
    return array > 0
