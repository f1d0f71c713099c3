"""Statistics of heads over the images of a run: a file for each batch, and tables over all of them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from visattn._support.checks import printable
from visattn._support.tables import without_nan
from visattn._support.types import Resize
from visattn.batch.journal import entries_of, journals_in
from visattn.errors import OutputError
from visattn.evaluation.survey import LayerNumbers, PhotoNumbers, Survey
from visattn.provenance import Provenance

FOLDER = "statistics"


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
            for told in json.loads(file.read_text()):
                if told["photo"]["photo"] in shown:
                    survey.enter(_numbers(told))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise OutputError(f"{printable(str(file))}: is damaged. Remove it and run the command again.") from error
    return survey


def _numbers(told: dict[str, Any]) -> PhotoNumbers:
    layers = {
        name: LayerNumbers(one["names"], *(np.array(one[part], dtype=np.float64) for part in ("heads", "whole", "beside")))
        for name, one in told["layers"].items()
    }
    gates = {(layer, role): numbers for layer, role, numbers in told["gates"]}
    left_out = [(why, layer) for why, layer in told["left_out"]]
    return PhotoNumbers(told["photo"], layers, gates, left_out, Provenance.from_dict(told["provenance"]))


def _lists(layer: LayerNumbers) -> dict[str, Any]:
    """Return the arrays as lists, with None for NaN, which JSON lacks."""
    return {part: without_nan(getattr(layer, part).tolist()) for part in ("heads", "whole", "beside")}
