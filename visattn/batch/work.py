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
from visattn.batch.journal import Entry
from visattn.batch.sources import Item
from visattn.drawing.pictures import to_png
from visattn.errors import ResourceError, VisattnError
from visattn.images import image_facts
from visattn.maps import save_map
from visattn.pipeline.batches import Asked, explained
from visattn.pipeline.explaining import explain_prepared
from visattn.pipeline.explanation import Explanation
from visattn.pipeline.inputs import Prepared, prepare_with
from visattn.pipeline.preprocessing import Preprocessing

_AHEAD = 2  # batches that are decoded before the model needs them, and batches that may wait to be written


@dataclass(frozen=True, eq=False)
class Wanted:
    """Files that a run writes for each image.

    Attributes:
        folder: Output folder.
        kind: Part of the file names that states the method.
        picture: Whether to write a picture.
        raw: Whether to write the raw map, as `save_map` does.
        drawing: Options of `Explanation.draw`.
    """

    folder: Path
    kind: str
    picture: bool = True
    raw: bool = False
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
    writing: deque[list[Future[Entry]]] = deque()

    def ahead() -> None:
        for first, items in islice(left, 1):
            reading.append((first, [readers.submit(_read, item, model, work.asked.how) for item in items]))

    for _ in range(_AHEAD):
        ahead()
    while reading:
        first, futures = reading.popleft()
        found = [future.result() for future in futures]
        ahead()
        writing.append([writers.submit(_write, *one, work.wanted, spare) for one in _explained(model, found, work.asked, first)])
        while len(writing) > _AHEAD:
            yield [future.result() for future in writing.popleft()]
    for entries in writing:
        yield [future.result() for future in entries]


def _read(item: Item, model: nn.Module, how: Preprocessing) -> _Read:
    """Decode and preprocess one image."""
    try:
        photo = item.photo(max_pixels=how.max_pixels, color_profile=how.color_profile)
        return _Read(item, image_facts(photo).sha256, prepare_with([photo], model, how), None)
    except VisattnError as error:
        return _Read(item, "", None, error)
    except MemoryError:
        return _Read(item, "", None, ResourceError(f"{printable(item.source)}: out of memory. Choose a smaller image."))


def _explained(
    model: nn.Module, found: Sequence[_Read], asked: Asked, first: int
) -> Iterator[tuple[int, _Read, Explanation | VisattnError]]:
    """Explain the images of a batch that were read; if one of them is at fault, the others are explained alone."""
    good = [one.prepared for one in found if one.prepared is not None]
    try:
        answers: list[Explanation | VisattnError] = list(explained(model, good, asked.question, seed=asked.seed)) if good else []
    except ResourceError:
        raise
    except VisattnError:
        answers = [_alone(model, one, asked) for one in good]
    left = iter(answers)
    for index, one in enumerate(found, start=first):
        yield index, one, next(left) if one.error is None else one.error


def _alone(model: nn.Module, prepared: Prepared, asked: Asked) -> Explanation | VisattnError:
    try:
        return explain_prepared(model, prepared, asked.question, seed=asked.seed)
    except ResourceError:
        raise
    except VisattnError as error:
        return error


def _write(index: int, one: _Read, answer: Explanation | VisattnError, wanted: Wanted, spare: Path) -> Entry:
    """Draw an explanation and write its files."""
    name = one.item.source
    if isinstance(answer, VisattnError):
        return Entry(index, name, one.sha256, (), first_line(answer))
    outputs: list[str] = []
    with torch.no_grad():
        if wanted.picture:
            outputs.append(f"{one.item.name}.{wanted.kind}.png")
            picture, provenance = answer.draw(**wanted.drawing)
            _put(wanted.folder / outputs[-1], to_png(picture, provenance), spare / f"{index}.png")
        if wanted.raw:
            outputs.append(f"{one.item.name}.{wanted.kind}.npz")
            _put(wanted.folder / outputs[-1], save_map(answer.map, answer.geometry), spare / f"{index}.npz")
    return Entry(index, name, one.sha256, tuple(outputs))


def _put(path: Path, data: bytes, spare: Path) -> None:
    """Write a file that is complete or absent; what a kill leaves behind stays among the spare files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(spare, data)
    try:
        os.replace(spare, path)
    except OSError as error:
        refused = refusal(error, path)
        raise refused from error
