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

from visattn._support.checks import first_line, printable
from visattn._support.files import regular
from visattn._support.typed import typed
from visattn.errors import MapError
from visattn.geometry import Box, Geometry
from visattn.maps import schema
from visattn.maps.attention_maps import AttentionMap
from visattn.maps.facts import MapFacts
from visattn.provenance import Provenance
from visattn.records import TokenLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray


@typed()
def save_map(attention_map: AttentionMap, geometry: Geometry) -> bytes:
    """Serialize a map and its geometry as the content of an `.npz` file, which `load_map` reads; `Explanation.save_map` writes one."""
    facts = map_facts(attention_map, geometry)
    stream = io.BytesIO()
    np.savez_compressed(stream, values=attention_map.values.detach().float().cpu().numpy(), facts=np.array(json.dumps(facts)))
    return stream.getvalue()


def load_map(path: str | os.PathLike[str]) -> tuple[AttentionMap, Geometry] | NDArray[np.float32]:
    """Load a map saved by `save_map`, or a plain `.npy` array `(height, width)`.

    Loading never executes code from the file, so files from untrusted sources are safe to read.

    Args:
        path: Path of an `.npz` or `.npy` file.

    Returns:
        The map with its geometry, or the array.

    Raises:
        MapError: If the file is neither a map nor an array, or its content is invalid.
    """
    name = printable(os.fspath(path))
    try:
        with regular(Path(path)).open("rb") as stream:
            return _read(stream, name)
    except MapError:
        raise
    except Exception as error:  # numpy, zipfile and json raise many types for damaged files
        raise MapError(
            f"{name}: not a map ({printable(str(error))[:120]}); make one with visattn.maps.save_map (--save-map), or pass an .npy array."
        ) from error


def _read(stream: IO[bytes], name: str) -> tuple[AttentionMap, Geometry] | NDArray[np.float32]:
    read = schema.read(stream)
    if isinstance(read, np.ndarray):
        return read
    facts, values = read
    geometry = Geometry.from_dict(place) if (place := facts["provenance"].get("geometry")) else None
    if geometry is None:
        raise MapError(f"{name}: the map has no geometry. Save it with visattn.maps.save_map (--save-map).")
    return map_of(facts, torch.from_numpy(values)), geometry


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
        with tarfile.open(regular(Path(path)), "r:") as archive:
            for member in archive:
                stream, name = archive.extractfile(member), f"{shown}/{printable(member.name)}"
                found = None if stream is None else _read(stream, name)
                if not isinstance(found, tuple):
                    raise MapError(f"{name}: an array or a folder. Pass a file of visattn.maps.pack_maps (--pack-maps).")
                yield (member.name.removesuffix(".npz"), *found)
    except MapError:
        raise
    except Exception as error:  # as in `load_map`, and of tarfile
        raise MapError(f"{shown}: not a file of maps, or damaged ({first_line(error)}). Make it again.") from error


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
