"""Validation of map files. Sizes and types are checked before use, since files may come from untrusted sources."""

from __future__ import annotations

import math
import zipfile
from typing import IO, TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np

from visattn._support.json_files import SIDE, Free, Number, Whole, decoded

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MOST_VALUES", "BoxFacts", "Facts", "GeometryFacts", "LayoutFacts", "ProvenanceFacts", "check_places"]

MOST_VALUES = 2**25  # of a map: 128 MiB as float32
_MOST_TEXT = 2**24  # bytes of the JSON facts
_LEAST = 1e-3  # pixels: shortest side of a box


_Text = str | None
_Size = tuple[Whole, Whole]
BoxFacts = tuple[Number, Number, Number, Number]
_Sinks = list[list[tuple[Whole, Whole, Number, str]]]


class GeometryFacts(TypedDict):
    """A `Geometry`."""

    photo: _Size
    input: _Size
    window: BoxFacts
    rule: str


class _Setting(TypedDict):
    value: list[Number]
    source: str


class _Score(Free):
    known = TypedDict("known", {"class": Whole, "name": _Text})


class _Provenance(TypedDict, total=False):
    model: str
    weights: str
    weights_sha256: _Text
    random: bool
    image: _Text
    image_sha256: _Text
    geometry: GeometryFacts | None
    preprocessing: dict[str, _Setting]
    method: _Text
    parameters: Free
    target: list[str]
    scores: list[_Score]
    normalization: _Text
    value_range: tuple[Number, Number] | None
    sinks: _Sinks
    notes: list[str]
    warnings: list[str]
    versions: Free
    drawing: Free


class ProvenanceFacts(Free):
    """A `Provenance`, which refuses unknown names."""

    known = _Provenance


class LayoutFacts(TypedDict):
    """A `TokenLayout`."""

    space: str
    prefix: list[str]
    grid: list[Whole]
    box: BoxFacts
    holes: NotRequired[list[Whole]]


class _KnownFacts(TypedDict):
    layer: str
    query: str
    sinks: _Sinks
    sinks_kept: bool
    glimpses: list[list[list[BoxFacts]]]
    windows: NotRequired[list[list[BoxFacts]]]
    detections: NotRequired[list[tuple[str, BoxFacts]]]
    pixelwise: bool
    query_at: NotRequired[list[tuple[Number, Number]]]
    interval: NotRequired[bool]
    input_size: NotRequired[_Size | None]
    numbers: NotRequired[list[tuple[str, Number]]]


class _MapFacts(Free):
    known = _KnownFacts


class Facts(TypedDict):
    """A map without its values."""

    axes: list[str]
    layout: LayoutFacts
    labels: dict[str, list[str]]
    meaning: str
    signed: NotRequired[bool]
    facts: NotRequired[_MapFacts]
    provenance: ProvenanceFacts


def read(stream: IO[bytes]) -> tuple[Facts, NDArray[np.float32]] | NDArray[np.float32]:
    """Read the facts and values of an `.npz` file, or the array of an `.npy` file, without executing anything from it.

    Raises:
        ValueError: If the file is neither, is too large, or holds facts of wrong types. Other errors of numpy, zipfile and the
            operating system are not caught.
    """
    if is_array(stream):
        return _array(stream, dimensions=2)
    if stream.read(2) != b"PK":  # zipfile also reads an archive behind something else, such as the last file of a .tar
        raise ValueError("it is neither an .npz nor an .npy file")
    with zipfile.ZipFile(stream) as archive:
        if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in archive.infolist()):
            raise ValueError("it is packed by a method that numpy does not write, whose size has no bound")
        info = archive.getinfo("facts.npy")
        if info.file_size > _MOST_TEXT:
            raise ValueError(f"its facts take {info.file_size:,} bytes, more than {_MOST_TEXT:,}")
        text = str(np.lib.format.read_array(archive.open(info), allow_pickle=False))
        facts = decoded(text, Facts, "its facts", lax=True)
        check_places(facts)
        with archive.open("values.npy") as values:
            return facts, _array(values)


def is_array(stream: IO[bytes]) -> bool:
    """Check whether a file begins like an `.npy` file; it is then read from its beginning again."""
    first = stream.read(6)
    stream.seek(0)
    return first == np.lib.format.MAGIC_PREFIX


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


def check_places(facts: Facts) -> None:
    """Check that boxes are not empty and that holes are cells of the grid."""
    layout, provenance = facts["layout"], facts["provenance"]
    boxes = {"its box": layout["box"]} | ({"its window": place["window"]} if (place := provenance.get("geometry")) else {})
    known = facts.get("facts") or _MapFacts()
    glimpses = [box for seen in known.get("glimpses", ()) for scales in seen for box in scales]
    detected = [box for _, box in known.get("detections", ())]
    windows = [box for boxes in known.get("windows", ()) for box in boxes]
    others = [
        *(("a glimpse", box) for box in glimpses),
        *(("a window", box) for box in windows),
        *(("a detection", box) for box in detected),
    ]
    for name, (top, left, bottom, right) in (*boxes.items(), *others):
        if not (_LEAST <= bottom - top <= SIDE and _LEAST <= right - left <= SIDE):
            raise ValueError(f"{name} must have sides of {_LEAST:g} to {SIDE:,} pixels")
    cells = math.prod(layout["grid"])
    if len(layout["grid"]) != 2 or min(layout["grid"]) < 1:
        raise ValueError("its grid must have rows and columns")
    holes = layout.get("holes", [])
    if holes != sorted({hole for hole in holes if 0 <= hole < cells}):
        raise ValueError("its holes must be cells of the grid, in ascending order")
