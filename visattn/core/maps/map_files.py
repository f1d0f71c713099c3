"""Map files: `save_map` writes a map, `load_map` reads it back."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from visattn._support.checks import first_line, one_of, printable, unreadable
from visattn._support.files import regular
from visattn._support.language import worded
from visattn._support.typed import typed
from visattn._support.types import MapFormat
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import map_schema as schema
from visattn.core.maps.attention_maps import AttentionMap
from visattn.core.maps.map_facts import MapFacts
from visattn.core.maps.map_formats import ENDINGS, check_axes, encode_grid, image_kind, read_image, read_table
from visattn.core.provenance import Provenance
from visattn.core.records import TokenLayout
from visattn.errors import MapError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["layout_facts", "layout_of", "map_facts", "map_of"]


@typed()
def save_map(attention_map: AttentionMap, geometry: Geometry, ending: MapFormat = "npz") -> bytes:
    """Serialize the raw values of a map on its grid as the content of a file; `Explanation.save_map` writes one.

    Args:
        attention_map: The map, `(*axes, rows, columns)`.
        geometry: Position of the model's input on the photo.
        ending: Format of the file, all of which `load_map` reads:

            - `npz` (default): values, layout, geometry and provenance; the only format that restores the axes of a map.
            - `npy`: the values alone, with any axes.
            - `csv`: one grid as text of full float32 precision, a line for each row, holes as `NaN`. Geometry and provenance are in
              lines that begin with `#`.
            - `tif`, `png`: one grid as 16-bit numbers, with geometry and provenance in the tags. A value is
              `offset + scale * number`, which differs from the map's by at most half a step, `range / 65535 / 2`. With holes, their
              number is 0, as the tag `nodata` says, and a step is `range / 65534`.

    Returns:
        The content.

    Raises:
        OptionError: If the format is unknown, or holds one grid but the map has several.
        MapError: If a parameter in the provenance is NaN or infinite.
    """
    one_of(ending, ENDINGS, "ending")
    check_axes(attention_map.axes, ending)
    facts = map_facts(attention_map, geometry)
    try:
        text = json.dumps(facts, allow_nan=False)
    except ValueError as error:
        raise MapError("The provenance of the map has a parameter that is NaN or infinite, which no file can hold.") from error
    values = attention_map.values.detach().float().cpu().numpy()
    if ending != "npz":
        return encode_grid(values, facts, ending)
    stream = io.BytesIO()
    np.savez_compressed(stream, values=values, facts=np.array(text))
    return stream.getvalue()


def load_map(path: str | os.PathLike[str]) -> tuple[AttentionMap, Geometry] | NDArray[np.float32]:
    """Load a map saved by `save_map`, or an array `(height, width)`: `.npy`, `.csv` or `.txt` without a header, a gray `.tif` or `.png`.

    Loading never executes code from the file, so files from untrusted sources are safe to read.

    Args:
        path: Path of the file.

    Returns:
        The map with its geometry, or the array if the file has no facts about a map, as `.npy`.

    Raises:
        MapError: If the file is neither a map nor an array, or its content is invalid.
    """
    name = printable(os.fspath(path))
    try:
        with _opened(path) as stream:
            return _placed(_content(stream, Path(path)), name)
    except MapError:
        raise
    except Exception as error:  # numpy, zipfile, Pillow and json raise many types for damaged files
        raise MapError(
            f"{name}: not a map ({printable(str(error))[:120]}); make one with {_saving()}, or pass an .npy array."
        ) from error


def _opened(path: str | os.PathLike[str]) -> IO[bytes]:
    try:
        return regular(Path(path)).open("rb")
    except OSError as error:
        raise MapError(unreadable(error, path)) from error


def _content(stream: IO[bytes], path: Path) -> tuple[schema.Facts, NDArray[np.float32]] | NDArray[np.float32]:
    """Read facts and values, or an array, in the format that the content has; tables are known by their ending."""
    if kind := image_kind(stream):
        return read_image(stream, kind)
    return read_table(stream) if path.suffix.lower() in (".csv", ".txt") else schema.read(stream)


def _placed(
    content: tuple[schema.Facts, NDArray[np.float32]] | NDArray[np.float32], name: str
) -> tuple[AttentionMap, Geometry] | NDArray[np.float32]:
    """Return the map with its geometry, or the array."""
    if isinstance(content, np.ndarray):
        return content
    facts, values = content
    geometry = Geometry.from_dict(place) if (place := facts["provenance"].get("geometry")) else None
    if geometry is None:
        raise MapError(f"{name}: the map has no geometry. Save it with {_saving()}.")
    try:
        return map_of(facts, torch.from_numpy(values)), geometry
    except MapError as error:
        raise MapError(f"{name}: is damaged ({str(error).partition('.')[0]}). Make it again.") from error


def pack_maps(maps: Iterable[tuple[str, AttentionMap, Geometry]]) -> bytes:
    """Serialize maps with their names and geometries as the content of a `.tar` file, which `load_maps` reads.

    It holds the `.npz` file of each map, as `save_map` makes it, and equal maps give equal files.
    """
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, one, geometry in maps:
            data = save_map(one, geometry)
            member = tarfile.TarInfo(f"{name}.npz")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def load_maps(path: str | os.PathLike[str]) -> Iterator[tuple[str, AttentionMap, Geometry]]:
    """Load the maps of a `.tar` file that `pack_maps` made, such as one of the option `--pack-maps` of `visattn batch`, one after another.

    Args:
        path: The file.

    Yields:
        The name of each image, its map, and the map's position on the photo.

    Raises:
        MapError: If the file holds something else, or is damaged.
    """
    shown = printable(os.fspath(path))
    try:
        with _opened(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                stream, name = archive.extractfile(member), f"{shown}/{printable(member.name)}"
                found = None if stream is None or schema.is_array(stream) else _placed(schema.read(stream), name)
                if not isinstance(found, tuple):
                    raise MapError(f"{name}: an array or a folder. Pass a file of {_packing()}.")
                yield (member.name.removesuffix(".npz"), *found)
    except MapError:
        raise
    except Exception as error:  # as in `load_map`, and of tarfile
        raise MapError(
            f"{shown}: cannot be read as a file of maps ({first_line(error)}). Pass one of {_packing()}; load_map reads a single map."
        ) from error


def map_facts(attention_map: AttentionMap, geometry: Geometry | None) -> dict[str, Any]:
    """Return everything about a map but its values, as plain values for JSON."""
    return {
        "axes": attention_map.axes,
        "layout": layout_facts(attention_map.layout),
        "labels": dict(attention_map.labels),
        "meaning": attention_map.meaning,
        "signed": attention_map.signed,
        "facts": attention_map.facts.to_dict(),
        "provenance": replace(attention_map.provenance, geometry=geometry).to_dict(),
    }


def map_of(facts: schema.Facts, values: Tensor) -> AttentionMap:
    """Build a map from the result of `map_facts`, which `schema` has checked, and its values."""
    labels = {key: tuple(value) for key, value in facts["labels"].items()}
    signed = bool(facts.get("signed", False))  # missing in older files; negative values imply it
    known = MapFacts.from_dict(facts["facts"]) if "facts" in facts else MapFacts()
    provenance, layout = Provenance.from_dict(facts["provenance"]), layout_of(facts["layout"])
    return AttentionMap(values, tuple(facts["axes"]), layout, labels, facts["meaning"], provenance, signed, known)


def layout_facts(layout: TokenLayout) -> dict[str, Any]:
    """Return a layout as plain values for JSON."""
    return {"space": layout.space, "prefix": layout.prefix, "grid": layout.grid, "box": layout.box, "holes": layout.holes}


def layout_of(facts: schema.LayoutFacts) -> TokenLayout:
    """Build a layout from the result of `layout_facts`, which `schema` has checked."""
    box, holes = Box(*facts["box"]), tuple(facts.get("holes", ()))
    return TokenLayout(facts["space"], tuple(facts["prefix"]), tuple(facts["grid"]), box, holes)


def _packing() -> str:
    return worded("visattn.maps.pack_maps", "visattn batch --pack-maps")


def _saving() -> str:
    return worded("visattn.maps.save_map", "visattn overlay --save-map")
