"""Run over many images: workers decode, the model runs in batches, and workers draw and write."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from visattn._support.checks import first_line, printable
from visattn._support.files import refusal, write_whole
from visattn._support.threads import pool
from visattn.batch.journal import Entry, Journal
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


class Batches(NamedTuple):
    """Batches of a run, or of a part of it: batch `b` holds the images from `b * size` on, and part `b % parts` computes it.

    Attributes:
        size: Images in a batch.
        part: Number of the part.
        parts: Number of parts.
    """

    size: int
    part: int = 0
    parts: int = 1

    def first(self, count: int) -> range:
        """Return the number of the first image of each batch of the part, of `count` images."""
        return range(self.part * self.size, count, self.parts * self.size)


class Outcome(NamedTuple):
    """Numbers of a run.

    Attributes:
        written: Images that were explained now.
        kept: Images that an earlier run had explained.
        failed: Images that could not be explained.
    """

    written: int
    kept: int
    failed: int


class _Read(NamedTuple):
    """An image that was read, or why it was not."""

    item: Item
    sha256: str
    prepared: Prepared | None
    error: VisattnError | None


def run(
    model: nn.Module,
    items: Sequence[Item],
    asked: Asked,
    wanted: Wanted,
    journal: Journal,
    *,
    batches: Batches,
    workers: int = 2,
    told: Callable[[Entry], None] = lambda entry: None,
) -> Outcome:
    """Explain images batch by batch. Which images share a batch does not depend on what was done before.

    A batch is left out if the journal knows all its images with the same content and without an error, and their files are there;
    otherwise all of it is computed. So a run that was interrupted gives the files of one that was not.

    Args:
        model: The model.
        items: The images.
        asked: What is asked of each.
        wanted: What to write.
        journal: Journal of the run.
        batches: Batches that are computed.
        workers: Threads that decode, and threads that draw and write.
        told: Function that is called with each entry once it is in the journal.

    Returns:
        Numbers of images.

    Raises:
        VisattnError: An error that concerns all images, such as a full disk.
    """
    spare = journal.path.with_name(f".{journal.path.name}.files")  # files that are not whole yet
    shutil.rmtree(spare, ignore_errors=True)  # of a run that was killed; the journal is locked, so no other run uses it
    spare.mkdir()
    try:
        with pool(workers) as readers, pool(workers) as writers:
            return _run(
                model, items, asked, wanted, journal, batches.first(len(items)), batches.size, (readers, writers, spare), told
            )
    finally:
        shutil.rmtree(spare, ignore_errors=True)


def _run(
    model: nn.Module,
    items: Sequence[Item],
    asked: Asked,
    wanted: Wanted,
    journal: Journal,
    firsts: range,
    size: int,
    tools: tuple[ThreadPoolExecutor, ThreadPoolExecutor, Path],
    told: Callable[[Entry], None],
) -> Outcome:
    written = kept = failed = 0
    readers, writers, spare = tools
    reading: deque[tuple[int, list[Future[_Read]]]] = deque()
    writing: deque[list[Future[Entry]]] = deque()
    left = iter(firsts)

    def ahead() -> None:
        nonlocal kept
        for first in left:
            some = items[first : first + size]
            if not _is_done(journal, wanted.folder, some, first):
                reading.append((first, [readers.submit(_read, item, model, asked.how) for item in some]))
                return
            kept += len(some)
            for index in range(first, first + len(some)):
                told(journal.known[index])

    def settle() -> None:
        nonlocal written, failed
        entries = [future.result() for future in writing.popleft()]
        journal.add(entries)
        for entry in entries:
            written, failed = written + (not entry.error), failed + bool(entry.error)
            told(entry)

    for _ in range(_AHEAD):
        ahead()
    while reading:
        first, futures = reading.popleft()
        found = [future.result() for future in futures]
        ahead()
        writing.append([writers.submit(_write, *one, wanted, spare) for one in _explained(model, found, asked, first)])
        while len(writing) > _AHEAD:
            settle()
    while writing:
        settle()
    return Outcome(written, kept, failed)


def _is_done(journal: Journal, folder: Path, some: Sequence[Item], first: int) -> bool:
    for index, item in enumerate(some, start=first):
        entry = journal.known.get(index)
        if entry is None or entry.error or entry.image != str(item.path):
            return False
        if not all((folder / output).is_file() for output in entry.outputs) or item.digest() != entry.sha256:
            return False
    return True


def _read(item: Item, model: nn.Module, how: Preprocessing) -> _Read:
    """Decode and preprocess one image."""
    try:
        photo = item.photo(max_pixels=how.max_pixels, color_profile=how.color_profile)
        return _Read(item, image_facts(photo).sha256, prepare_with([photo], model, how), None)
    except VisattnError as error:
        return _Read(item, "", None, error)
    except MemoryError:
        return _Read(item, "", None, ResourceError(f"{printable(str(item.path))}: out of memory. Choose a smaller image."))


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
    name = str(one.item.path)
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
