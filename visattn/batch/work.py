"""Work on the images of a run: workers decode, the model runs in batches, and workers draw and write."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from visattn._support.checks import first_line, printable
from visattn._support.files import refusal, write_whole
from visattn._support.threads import pool
from visattn.batch import statistics
from visattn.batch.journal import Entry
from visattn.batch.sources import Item
from visattn.drawing.pictures import to_png
from visattn.errors import ResourceError, VisattnError
from visattn.evaluation.survey import PhotoNumbers, photo_numbers
from visattn.images import image_facts
from visattn.maps import pack_maps, save_map
from visattn.pipeline.batches import Asked, explained, looked
from visattn.pipeline.explaining import explain_prepared
from visattn.pipeline.explanation import Explanation
from visattn.pipeline.inputs import Prepared, prepare_with
from visattn.pipeline.preprocessing import Preprocessing
from visattn.studies.creation import view_of
from visattn.studies.views import View
from visattn.studies.writing import content

_AHEAD = 2  # batches that are decoded before the model needs them, and batches that may wait to be written


@dataclass(frozen=True, eq=False)
class Wanted:
    """Files that a run writes for each image.

    Attributes:
        folder: Output folder.
        kind: Part of the file names that states the method.
        picture: Whether to write a picture.
        raw: Whether to write the raw map, as `save_map` does.
        packed: Whether to write the raw maps of a batch into one file, as `pack_maps` does.
        study: Whether to write a study.
        statistics: Whether to write the statistics of each batch.
        drawing: Options of `Explanation.draw`.
    """

    folder: Path
    kind: str
    picture: bool = True
    raw: bool = False
    packed: bool = False
    study: bool = False
    statistics: bool = False
    drawing: Mapping[str, Any] = field(default_factory=dict)


class Batch(NamedTuple):
    """Images that run through the model together.

    Attributes:
        first: Number of the first in the run.
        items: The images.
    """

    first: int
    items: Sequence[Item]


class _Read(NamedTuple):
    """An image that was read, or why it was not."""

    item: Item
    sha256: str
    prepared: Prepared | None
    error: VisattnError | None


class _Answered(NamedTuple):
    """An image with all that is written of it, or why nothing is.

    Attributes:
        number: Number of the image in the run.
        read: The image.
        answer: Its explanation, or the error.
        view: Its view in a study, if there is to be one.
        numbers: Its statistics, if they are wanted.
    """

    number: int
    read: _Read
    answer: Explanation | VisattnError
    view: View | None = None
    numbers: PhotoNumbers | None = None


@dataclass(frozen=True, eq=False)
class Work:
    """Question, files and folders of a run, which are the same for each image.

    Attributes:
        asked: Question that is asked.
        wanted: What to write.
        threads: Threads that decode, and threads that draw and write.
    """

    asked: Asked
    wanted: Wanted
    threads: int = 2


def done(model: nn.Module, batches: Iterable[Batch], work: Work, spare: Path) -> Iterator[list[Entry]]:
    """Explain batches of images, and write their files.

    Args:
        model: The model.
        batches: Batches, which are read ahead.
        work: Question, files and folders.
        spare: Folder for files that are not whole yet, on the file system of the output. No other process may use it.

    Yields:
        The entries of each batch, once its files are there.

    Raises:
        VisattnError: An error that concerns all images, such as a full disk.
    """
    shutil.rmtree(spare, ignore_errors=True)  # of a run that was killed
    spare.mkdir(parents=True)
    try:
        with pool(work.threads) as readers, pool(work.threads) as writers:
            yield from _done(model, iter(batches), work, spare, readers, writers)
    finally:
        shutil.rmtree(spare, ignore_errors=True)


def _done(
    model: nn.Module, left: Iterator[Batch], work: Work, spare: Path, readers: ThreadPoolExecutor, writers: ThreadPoolExecutor
) -> Iterator[list[Entry]]:
    reading: deque[tuple[int, list[Future[_Read]]]] = deque()
    writing: deque[tuple[list[_Answered], list[Future[Entry]]]] = deque()

    def ahead() -> None:
        for first, items in islice(left, 1):
            reading.append((first, [readers.submit(_read, item, model, work.asked.how) for item in items]))

    def settled() -> list[Entry]:
        answered, futures = writing.popleft()
        return _of_batch(answered, [future.result() for future in futures], work.wanted, spare)

    for _ in range(_AHEAD):
        ahead()
    while reading:
        first, futures = reading.popleft()
        found = [future.result() for future in futures]
        ahead()
        answered = list(_answered(model, found, work, first))
        writing.append((answered, [writers.submit(_write, one, work.wanted, spare) for one in answered]))
        while len(writing) > _AHEAD:
            yield settled()
    while writing:
        yield settled()


def _read(item: Item, model: nn.Module, how: Preprocessing) -> _Read:
    """Decode and preprocess one image."""
    try:
        photo = item.photo(max_pixels=how.max_pixels, color_profile=how.color_profile)
        return _Read(item, image_facts(photo).sha256, prepare_with([photo], model, how), None)
    except VisattnError as error:
        return _Read(item, "", None, error)
    except MemoryError:
        return _Read(item, "", None, ResourceError(f"{printable(item.source)}: out of memory. Choose a smaller image."))


def _answered(model: nn.Module, found: Sequence[_Read], work: Work, first: int) -> Iterator[_Answered]:
    """Explain the images of a batch that were read; if one of them is at fault, the others are explained alone."""
    asked, wanted = work.asked, work.wanted
    good = [one.prepared for one in found if one.prepared is not None]
    try:
        answers: list[Explanation | VisattnError] = list(explained(model, good, asked.question, seed=asked.seed)) if good else []
    except ResourceError:
        raise
    except VisattnError:
        answers = [_alone(model, one, asked) for one in good]
    fine = [one for one, answer in zip(good, answers, strict=True) if not isinstance(answer, VisattnError)]
    recordings = iter(looked(model, fine) if wanted.statistics and fine else ())
    left = iter(answers)
    for number, one in enumerate(found, start=first):
        if one.prepared is None:
            assert one.error is not None  # noqa: S101
            yield _Answered(number, one, one.error)
            continue
        answer = next(left)
        if isinstance(answer, VisattnError):
            yield _Answered(number, one, answer)
            continue
        view = view_of(model, one.prepared, None, asked.question.target, asked.seed) if wanted.study else None
        recording, name = next(recordings, None), printable(one.item.source)
        yield _Answered(number, one, answer, view, None if recording is None else photo_numbers(recording, one.prepared, name))


def _alone(model: nn.Module, prepared: Prepared, asked: Asked) -> Explanation | VisattnError:
    try:
        return explain_prepared(model, prepared, asked.question, seed=asked.seed)
    except ResourceError:
        raise
    except VisattnError as error:
        return error


def _write(one: _Answered, wanted: Wanted, spare: Path) -> Entry:
    """Draw an explanation and write the files of an image."""
    item, answer = one.read.item, one.answer
    if isinstance(answer, VisattnError):
        return Entry(one.number, item.source, one.read.sha256, (), first_line(answer))
    files: dict[str, bytes] = {}
    with torch.no_grad():
        if wanted.picture:
            files[f"{item.name}.{wanted.kind}.png"] = to_png(*answer.draw(**wanted.drawing))
        if wanted.raw:
            files[f"{item.name}.{wanted.kind}.npz"] = save_map(answer.map, answer.geometry)
        if one.view is not None:
            files[f"{item.name}.attn"] = content([one.view])
    for name, data in files.items():
        _put(wanted.folder / name, data, spare / f"{one.number}{Path(name).suffix}")
    return Entry(one.number, item.source, one.read.sha256, tuple(files))


def _of_batch(answered: Sequence[_Answered], entries: Sequence[Entry], wanted: Wanted, spare: Path) -> list[Entry]:
    """Write the files of a batch, and return the entries of its images, which name them too."""
    files: dict[str, bytes] = {}
    first = answered[0].number
    known = [(one.read.item.name, one.answer) for one in answered if not isinstance(one.answer, VisattnError)]
    if wanted.packed and known:
        files[f"maps/{first:08}.{wanted.kind}.tar"] = pack_maps((name, one.map, one.geometry) for name, one in known)
    numbers = [one.numbers for one in answered if one.numbers is not None]
    if numbers:
        files[statistics.file_of(first)] = statistics.serialized(numbers)
    for name, data in files.items():
        _put(wanted.folder / name, data, spare / f"batch{Path(name).suffix}")
    return [entry if entry.error else entry._replace(outputs=(*entry.outputs, *files)) for entry in entries]


def _put(path: Path, data: bytes, spare: Path) -> None:
    """Write a file that is complete or absent; what a kill leaves behind stays among the spare files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(spare, data)
    try:
        os.replace(spare, path)
    except OSError as error:
        refused = refusal(error, path)
        raise refused from error
