"""Validation of map files. Sizes and types are checked before use, since files may come from untrusted sources."""

from __future__ import annotations

import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from visattn._support.files import regular

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_VALUES = 2**25  # of a map: 128 MiB as float32
_MOST_TEXT = 2**24  # bytes of the JSON facts
_DEEPEST = 20  # nesting of objects and lists in a field of any content
_SIDE = 2**20  # pixels, cells and tokens along one axis
_LEAST = 1e-3  # pixels: shortest side of a box
_LARGEST = 1e30  # magnitude of any number


@dataclass(frozen=True)
class _Maybe:
    """A JSON shape that may be null."""

    shape: Any


# JSON shapes: a type; {name: shape} for an object, with `name?` for an optional name, or {str: shape} for any names; [shape] for a list
# of any length; (shape, ...) for a list of this length; `_Maybe` for a value that may be null; `dict` for an object with any content
_TEXT = _Maybe(str)
_GEOMETRY = {"photo": (int, int), "input": (int, int), "window": (float,) * 4, "rule": str}
_PROVENANCE = {
    "model?": str,
    "weights?": str,
    "weights_sha256?": _TEXT,
    "random?": bool,
    "image?": _TEXT,
    "image_sha256?": _TEXT,
    "geometry?": _Maybe(_GEOMETRY),
    "preprocessing?": {str: {"value": [float], "source": str}},
    "method?": _TEXT,
    "parameters?": dict,
    "target?": [str],
    "scores?": [dict],
    "normalization?": _TEXT,
    "value_range?": _Maybe((float, float)),
    "sinks?": [[(int, int, float, str)]],
    "notes?": [str],
    "warnings?": [str],
    "versions?": dict,
    "drawing?": dict,
}
_LAYOUT = {"space": str, "prefix": [str], "grid": [int], "box": (float,) * 4, "holes?": [int]}
_SINKS = [[(int, int, float, str)]]
_KNOWN = {
    "layer": str,
    "query": str,
    "sinks": _SINKS,
    "sinks_kept": bool,
    "glimpses": [[[(float,) * 4]]],
    "detections?": [(str, (float,) * 4)],
    "pixelwise": bool,
    "query_at?": [(float,) * 2],
    "interval?": bool,
    "input_size?": _Maybe((int, int)),
}
_FACTS = {
    "axes": [str],
    "layout": _LAYOUT,
    "labels": {str: [str]},
    "meaning": str,
    "signed?": bool,
    "facts?": _KNOWN,
    "provenance": _PROVENANCE,
}


def read(path: Path) -> tuple[dict[str, Any], NDArray[np.float32]] | NDArray[np.float32]:
    """Read the facts and values of an `.npz` file, or the array of an `.npy` file, without executing anything from it.

    Raises:
        ValueError: If the file is neither, is too large, or holds facts of wrong types. Other errors of numpy, zipfile, json and the
            operating system are not caught.
    """
    with regular(path).open("rb") as stream:
        if stream.read(6) == np.lib.format.MAGIC_PREFIX:
            return _array(stream, dimensions=2)
        with zipfile.ZipFile(stream) as archive:
            info = archive.getinfo("facts.npy")
            if info.file_size > _MOST_TEXT:
                raise ValueError(f"its facts take {info.file_size:,} bytes, more than {_MOST_TEXT:,}")
            facts = json.loads(str(np.lib.format.read_array(archive.open(info), allow_pickle=False)))
            _check(facts, _FACTS, "its facts")
            _check_places(facts)
            with archive.open("values.npy") as values:
                return facts, _array(values)


def _array(stream: IO[bytes], dimensions: int | None = None) -> NDArray[np.float32]:
    """Read an array as float32, after checking its header for size and numeric type."""
    stream.seek(0)
    version = np.lib.format.read_magic(stream)
    header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if header is None:
        raise ValueError(f"its array is of version {version}")
    shape, _order, kind = header(stream)
    if kind.kind not in "uifb" or dimensions not in (None, len(shape)):
        raise ValueError(f"a map must be an array (rows, columns) of numbers, got {kind} {shape}")
    if math.prod(shape) > MOST_VALUES:
        raise ValueError(f"its {' x '.join(map(str, shape))} values are more than {MOST_VALUES:,}")
    stream.seek(0)
    values: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    return values.astype(np.float32)


def _check(value: Any, shape: Any, name: str) -> None:  # noqa: ANN401 - JSON
    """Check JSON against a shape. Unknown names pass here and fail where they are used."""
    if shape is dict:
        _check(value, {}, name)
        _check_plain(value, name, _DEEPEST)
    elif isinstance(shape, _Maybe):
        if value is not None:
            _check(value, shape.shape, name)
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object")
        every = shape.get(str)
        for key in value if every else shape:
            if key.removesuffix("?") in value:
                _check(value[key.removesuffix("?")], every or shape[key], key.removesuffix("?"))
            elif not key.endswith("?"):
                raise ValueError(f"{name} must have '{key}'")
    elif isinstance(shape, (list, tuple)):
        if not isinstance(value, list) or (isinstance(shape, tuple) and len(value) != len(shape)):
            raise ValueError(f"{name} must be a list" + (f" of {len(shape)}" if isinstance(shape, tuple) else ""))
        for item, inner in zip(value, shape * len(value) if isinstance(shape, list) else shape, strict=True):
            _check(item, inner, name)
    elif shape is float:
        if type(value) not in (int, float) or not abs(value) < _LARGEST:
            raise ValueError(f"{name} must be a finite number")
    elif type(value) is not shape or (shape is int and abs(value) > _SIDE):
        raise ValueError(f"{name} must be {shape.__name__}")


def _check_plain(value: Any, name: str, depth: int) -> None:  # noqa: ANN401 - JSON
    """Check that numbers are finite, and that nesting is not too deep to be saved again."""
    if depth == 0:
        raise ValueError(f"{name} is nested too deeply")
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_plain(item, name, depth - 1)
    elif isinstance(value, (int, float)) and not abs(value) < _LARGEST:
        raise ValueError(f"{name} must hold finite numbers")


def _check_places(facts: dict[str, Any]) -> None:
    """Check that boxes are not empty and that holes are cells of the grid."""
    layout, provenance = facts["layout"], facts["provenance"]
    boxes = {"its box": layout["box"]} | ({"its window": place["window"]} if (place := provenance.get("geometry")) else {})
    glimpses = [box for seen in facts.get("facts", {}).get("glimpses", ()) for scales in seen for box in scales]
    detected = [box for _, box in facts.get("facts", {}).get("detections", ())]
    others = [*(("a glimpse", box) for box in glimpses), *(("a detection", box) for box in detected)]
    for name, (top, left, bottom, right) in (*boxes.items(), *others):
        if not (_LEAST <= bottom - top <= _SIDE and _LEAST <= right - left <= _SIDE):
            raise ValueError(f"{name} must have sides of {_LEAST:g} to {_SIDE:,} pixels")
    cells = math.prod(layout["grid"])
    if len(layout["grid"]) != 2 or min(layout["grid"]) < 1:
        raise ValueError("its grid must have rows and columns")
    holes = layout.get("holes", [])
    if holes != sorted({hole for hole in holes if 0 <= hole < cells}):
        raise ValueError("its holes must be cells of the grid, in ascending order")
