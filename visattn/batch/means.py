"""Mean maps of groups of images: a file of sums for each batch, and at the end one file and one figure of all means."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import torch

from visattn._support.checks import first_line, printable
from visattn._support.json_files import Count, Finite, decoded
from visattn._support.language import worded
from visattn._support.types import MeanBy
from visattn.batch.journal import entries_of, journals_in
from visattn.core.drawing.pictures import to_png
from visattn.core.maps import pack_maps
from visattn.core.maps.arithmetic import MapSum, check_alike, frame_of
from visattn.core.maps.map_files import map_facts, map_of
from visattn.core.maps.map_schema import Facts, check_places
from visattn.core.pipeline.comparisons import comparison_page
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.outputs import noun_of
from visattn.errors import MapError, OptionError, OutputError

FOLDER = "sums"
_PANEL = 200  # pixels
_BY = {"all": "", "class": " by predicted class", "folder": " by folder"}


class Part(NamedTuple):
    """An image's part of a mean: its group, and its map."""

    group: str
    sum: MapSum


class _Stored(TypedDict):
    group: str
    total: list[list[Finite]]
    counts: list[list[Count]]
    maps: Count
    empty: Count
    digest: str
    like: Facts


class Frames:
    """Check that the maps of all images of a run have one grid on one input, as soon as one has another."""

    def __init__(self) -> None:
        """Begin without an image."""
        self._first: MapSum | None = None

    def check(self, parts: Iterable[Part]) -> None:
        """Check the images of a batch.

        Raises:
            MapError: If the cells of one do not correspond to those of the first.
        """
        for part in parts:
            self._first = self._first or part.sum
            check_alike(self._first.like, part.sum.like)


def file_of(first: int) -> str:
    """Return the name of the file of a batch, relative to the output folder."""
    return f"{FOLDER}/{first:08}.json"


def files_of_run(kind: str) -> tuple[str, str]:
    """Return the names of the files of all means: the maps, and the figure."""
    return f"means.{kind}.tar", f"means.{kind}.png"


def part_of(answer: Explanation, source: str, by: MeanBy) -> Part:
    """Return the part of an image.

    Args:
        answer: Its explanation.
        source: Its path, whose folder may be its group.
        by: What decides the group.

    Raises:
        OptionError: If maps of this method can have no mean, or the group is the predicted class, and none was predicted.
    """
    try:
        mapped = MapSum.of(answer.panel)
    except MapError as error:  # of the method, which is the same for all images
        raise OptionError(str(error)) from error
    if by == "class":
        return Part(_predicted(answer), mapped)
    return Part("all" if by == "all" else os.path.dirname(source) or os.curdir, mapped)  # noqa: PTH120 - sources may be addresses


def _predicted(answer: Explanation) -> str:
    """Return the class that was predicted for an image, by its number, and its name if it is known."""
    scores = answer.provenance.scores
    if not scores or "predicted" not in scores[0]:
        raise OptionError(
            f"method '{answer.provenance.method}' predicts no class, so there is no mean by class. Use a method that explains a class, "
            "such as gradcam, or another group, such as folder."
        )
    score = scores[0]
    if noun_of(score["outputs"]) != "class":
        raise OptionError(
            f"the model's outputs are {score['outputs']}, not known to be classes, so there is no mean by class. Say that they are: "
            + worded("task='classes'.", "--task classes, or --labels FILE.")
        )
    name = score["name"] if score["class"] == score["predicted"] else None
    return f"{score['predicted']} {name.replace('/', '_')}" if name else f"class {score['predicted']}"


def serialized(parts: Iterable[Part]) -> bytes:
    """Return the content of the file of a batch; sums keep all their digits."""
    groups = _summed(parts)
    stored = [
        {
            "group": group,
            "total": one.total.tolist(),
            "counts": one.counts.tolist(),
            "maps": one.maps,
            "empty": one.empty,
            "digest": one.digest,
            "like": map_facts(one.like, one.like.provenance.geometry),
        }
        for group, one in groups.items()
    ]
    return json.dumps(stored, allow_nan=False).encode()


def collected(folder: Path, sources: Sequence[str]) -> dict[str, MapSum]:
    """Collect the sums of a run and its other parts, by group: of the files that the journals in its folder name.

    Args:
        folder: Output folder.
        sources: Source of each image of the run. A file with an image that is not among them is left out.

    Raises:
        OutputError: If a file is damaged.
        MapError: If maps have different grids or inputs.
    """
    named: dict[str, bool] = {}
    for journal in journals_in(folder):
        for entry in entries_of(journal).values():
            given = entry.number < len(sources) and entry.image == sources[entry.number]
            for name in (name for name in entry.outputs if name.startswith(f"{FOLDER}/")):
                named[name] = named.get(name, True) and given
    parts = [part for name in sorted(named) if named[name] for part in _read(folder / name)]
    Frames().check(parts)
    return _summed(parts)


def contents(groups: dict[str, MapSum], by: MeanBy) -> tuple[bytes, bytes, list[str]]:
    """Return the file of the means, their figure, and the groups without a mean, whose maps are all zero.

    Raises:
        MapError: If no group has a mean.
    """
    some = {group: one for group, one in sorted(groups.items(), key=_order) if one.maps}
    if not some:
        raise MapError("all maps are zero everywhere, so there is no mean.")
    names = _short([*some]) if by == "folder" else [*some]
    means = [one.mean() for one in some.values()]
    labels = [
        f"{printable(name)}: {one.maps} image{'s' * (one.maps > 1)}" for name, one in zip(names, some.values(), strict=True)
    ]
    every = sum(one.maps for one in some.values())
    made = means[0].provenance
    title = f"mean maps of {every} images{_BY[by]}: {made.method}, {made.model}"
    notes = ("averaged in the frame of the model's input, whatever part of each photo it holds",)
    page = comparison_page([*means], labels, panel=_PANEL, title=title, notes=notes, opacity=1)
    packed = pack_maps((name, one, frame_of(one)) for name, one in zip(names, means, strict=True))
    return packed, to_png(page), [group for group in groups if group not in some]


def _summed(parts: Iterable[Part]) -> dict[str, MapSum]:
    groups: dict[str, MapSum] = {}
    for group, one in parts:
        groups[group] = groups[group].plus(one) if group in groups else one
    return groups


def _order(group: tuple[str, MapSum]) -> tuple[int, str]:
    """Order classes by their number, and other groups by name."""
    number = group[0].removeprefix("class ").partition(" ")[0]
    return (int(number) if number.isdecimal() else -1, group[0])


def _short(folders: Sequence[str]) -> list[str]:
    """Return the names of folders from the one on that holds all."""
    try:
        start = os.path.dirname(os.path.commonpath(folders))  # noqa: PTH120 - sources may be addresses
        return [os.path.relpath(folder, start or os.curdir) for folder in folders]
    except ValueError:  # some begin at the root, others do not
        return [folder.strip("/") for folder in folders]


def _read(file: Path) -> list[Part]:
    try:
        return [Part(one["group"], _sum(one)) for one in decoded(file.read_bytes(), list[_Stored], "the file", lax=True)]
    except (OSError, ValueError, TypeError, MapError) as error:
        raise OutputError(
            f"{printable(str(file))}: is damaged ({first_line(error)}). Remove it and run the command again."
        ) from error


def _sum(stored: _Stored) -> MapSum:
    check_places(stored["like"])
    total, counts = np.array(stored["total"], np.float64), np.array(stored["counts"], np.int64)
    like = map_of(stored["like"], torch.zeros(*stored["like"]["layout"]["grid"]))
    if not total.shape == counts.shape == like.values.shape:
        raise ValueError("sums must have the shape of the grid")
    return MapSum(like, total, counts, stored["maps"], stored["empty"], "relative", stored["digest"])
