"""Statistics of heads over the images of a run: a file for each batch, and tables over all of them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from visattn._support.checks import first_line, printable
from visattn._support.json_files import Finite, Free, Number, decoded
from visattn._support.tables import without_nan
from visattn._support.types import Resize
from visattn.batch.journal import entries_of, journals_in
from visattn.core.maps.map_schema import ProvenanceFacts
from visattn.core.provenance import Provenance
from visattn.errors import OutputError
from visattn.evaluation import LayerNumbers, PhotoNumbers, Survey

FOLDER = "statistics"


class _RowNames(TypedDict):
    photo: str
    sinks: Number | None


class _Row(Free):
    known = _RowNames


class _Layer(TypedDict):
    names: list[str]
    heads: list[list[Number | None]]
    whole: tuple[Number | None, Number | None]
    beside: tuple[Number | None, Number | None, Number | None]


class _Photo(TypedDict):
    photo: _Row
    layers: dict[str, _Layer]
    gates: list[tuple[str, str, dict[str, Finite]]]
    left_out: list[tuple[str, str]]
    provenance: ProvenanceFacts


def file_of(first: int) -> str:
    """Return the name of the file of a batch, relative to the output folder."""
    return f"{FOLDER}/{first:08}.json"


def serialized(photos: Sequence[PhotoNumbers]) -> bytes:
    """Return the content of the file of a batch; numbers keep all their digits."""
    told = [
        {
            "photo": one.photo,
            "layers": {name: {"names": layer.names, **_lists(layer)} for name, layer in one.layers.items()},
            "gates": [[*place, numbers] for place, numbers in one.gates.items()],
            "left_out": one.left_out,
            "provenance": one.provenance.to_dict(),
        }
        for one in photos
    ]
    return json.dumps(told, allow_nan=False).encode()


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a `with` block for the folder, so that tables of parts are not written one over the other."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems of networks lock no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def collected(folder: Path, sources: Sequence[str], seed: int, resize: Resize = "auto") -> Survey:
    """Collect the statistics of a run and its other parts: of the files that the journals in its folder name.

    Args:
        folder: Output folder.
        sources: Source of each image of the run. What an earlier run wrote for others is left out.
        seed: Seed of the bootstrap.
        resize: How the images were fitted to the model's input.

    Raises:
        OutputError: If a file is damaged.
    """
    named: set[str] = set()
    for journal in journals_in(folder):
        for entry in entries_of(journal).values():
            if entry.number < len(sources) and entry.image == sources[entry.number]:
                named |= {name for name in entry.outputs if name.startswith(f"{FOLDER}/")}
    survey, shown = Survey(seed=seed, resize=resize), {printable(source) for source in sources}
    for file in (folder / name for name in sorted(named)):
        try:
            for told in decoded(file.read_bytes(), list[_Photo], "the file", lax=True):
                if told["photo"]["photo"] in shown:
                    survey.enter(_numbers(told))
        except (OSError, ValueError, TypeError) as error:  # TypeError: an unknown name in the provenance
            raise OutputError(
                f"{printable(str(file))}: is damaged ({first_line(error)}). Remove it and run the command again."
            ) from error
    return survey


def _numbers(told: _Photo) -> PhotoNumbers:
    layers = {name: _layer(one) for name, one in told["layers"].items()}
    gates = {(layer, role): numbers for layer, role, numbers in told["gates"]}
    left_out = [(why, layer) for why, layer in told["left_out"]]
    return PhotoNumbers(told["photo"], layers, gates, left_out, Provenance.from_dict(told["provenance"]))


def _layer(told: _Layer) -> LayerNumbers:
    heads, names = np.array(told["heads"], dtype=np.float64), told["names"]
    if heads.shape != (len(heads), len(names)):
        raise ValueError(f"each head must have {len(names)} numbers")
    return LayerNumbers(names, heads, *(np.array(part, dtype=np.float64) for part in (told["whole"], told["beside"])))


def _lists(layer: LayerNumbers) -> dict[str, Any]:
    """Return the arrays as lists, with None for NaN, which JSON lacks."""
    return {part: without_nan(getattr(layer, part).tolist()) for part in ("heads", "whole", "beside")}
