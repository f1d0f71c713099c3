"""Files that a run writes, and the check that they replace nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visattn._support.checks import printable
from visattn._support.files import exists
from visattn._support.language import flag
from visattn._support.tables import STATISTICS
from visattn._support.types import MapFormat, MeanBy
from visattn.batch import means, statistics
from visattn.batch.image_sources import Batches
from visattn.batch.items import Item
from visattn.batch.journal import Journal, entries_of, files_of, journals_in
from visattn.batch.settings import DECIDES_NOTHING
from visattn.errors import OutputError


@dataclass(frozen=True, eq=False)
class Wanted:
    """Files that a run writes for each image.

    Attributes:
        folder: Output folder.
        kind: Part of the file names that states the method.
        picture: Whether to write a picture.
        raw: Whether to write the raw map, as `save_map` does.
        raw_ending: Format of the raw map.
        packed: Whether to write the raw maps of a batch into one file, as `pack_maps` does.
        study: Whether to write a study.
        statistics: Whether to write the statistics of each batch.
        means: Groups of images whose mean maps are written; none by default.
        drawing: Options of `Explanation.draw`.
    """

    folder: Path = field(metadata=DECIDES_NOTHING)
    kind: str
    picture: bool = True
    raw: bool = False
    raw_ending: MapFormat = "npz"
    packed: bool = False
    study: bool = False
    statistics: bool = False
    means: MeanBy | None = None
    drawing: Mapping[str, Any] = field(default_factory=dict)

    def of_image(self, name: str) -> dict[str, str]:
        """Return the files of an image by what they are: `picture`, `raw` and `study`, relative to the folder; none without a name."""
        if not name:
            return {}
        raw = "map.png" if self.raw_ending == "png" else self.raw_ending  # not the name of the picture
        every = {"picture": f"{name}.{self.kind}.png", "raw": f"{name}.{self.kind}.{raw}", "study": f"{name}.attn"}
        return {what: file for what, file in every.items() if getattr(self, what)}

    def of_batch(self, first: int) -> dict[str, str]:
        """Return the files of a batch by what they are: `packed`, `statistics` and `means`, relative to the folder."""
        every = {
            "packed": f"maps/{first:08}.{self.kind}.tar",
            "statistics": statistics.file_of(first),
            "means": means.file_of(first),
        }
        return {what: file for what, file in every.items() if getattr(self, what)}

    def names(self, name: str, first: int) -> set[str]:
        """Return the names of all files of an image and of its batch."""
        return {*self.of_image(name).values(), *self.of_batch(first).values()}

    def of_run(self) -> tuple[str, ...]:
        """Return the files of the whole run, relative to the folder."""
        return (*(STATISTICS if self.statistics else ()), *(means.files_of_run(self.kind) if self.means else ()))


def check_outputs(
    wanted: Wanted, items: Sequence[Item], batches: Batches, journal: Journal, inputs: Iterable[str | os.PathLike[str]] = ()
) -> None:
    """Check that a run replaces no file but its own.

    Args:
        wanted: What is written.
        items: All images of the run.
        batches: Batches that are computed.
        journal: Journal of the run.
        inputs: What the images were listed from, such as a list or a tar file.

    Raises:
        OutputError: If an input would be replaced, a result of an image that is not in this run, or a file of something else.
    """
    read = {os.path.abspath(item.source) for item in items if item.content is None}  # noqa: PTH100 - a path of each of a million
    read |= {os.path.abspath(source) for source in inputs}  # noqa: PTH100
    given = {item.source for item in items}
    known = [entry for path in journals_in(wanted.folder) for entry in entries_of(path).values()]
    owners = {output: entry.image for entry in known for output in entry.outputs if entry.image not in given}
    named = set().union(*map(files_of, journals_in(wanted.folder)))
    place = os.path.abspath(wanted.folder)  # noqa: PTH100
    for file, of in _files(wanted, items, batches):
        path = f"{place}{os.sep}{file}"
        if path in read:
            problem = "is an input of this run, and would be replaced"
        elif of == "image" and file in owners:
            problem = f"is of another image, {printable(owners[file])}, and would be replaced"
        elif of == "run" and known:
            continue
        elif file not in named and exists(Path(path)):
            problem = "exists already, and no journal of this run names it"
        elif journal.new and exists(Path(path)):
            problem = "is of another part of this run, which had another list of images or another number of parts"
        else:
            continue
        raise OutputError(f"{printable(str(wanted.folder / file))}: {problem}. Choose another folder{flag('output')}.")


def _files(wanted: Wanted, items: Sequence[Item], batches: Batches) -> Iterator[tuple[str, str]]:
    """Yield each file that a part of a run writes, and whether it is of an image, a batch or the run."""
    yield from ((file, "run") for file in wanted.of_run())
    for number in batches.first(len(items)):
        some = items[number : number + batches.size]
        yield from ((file, "image") for item in some for file in wanted.of_image(item.name).values())
        yield from ((file, "batch") for file in wanted.of_batch(number).values())
