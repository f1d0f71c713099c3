"""Work on the images of a run: workers decode, the model runs in batches, and workers draw and write."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from visattn._support.checks import first_line, printable
from visattn._support.files import exists, is_folder
from visattn._support.language import flag
from visattn._support.shortages import lacks_memory
from visattn._support.threads import pool
from visattn._support.untrusted import inside
from visattn._support.whole_files import refusal, write_whole
from visattn.batch import means, statistics
from visattn.batch.items import Item
from visattn.batch.journal import Entry
from visattn.batch.map_samples import sample_of
from visattn.batch.settings import DECIDES_NOTHING
from visattn.batch.wanted import Wanted
from visattn.core.drawing.pictures import to_png
from visattn.core.images import image_facts
from visattn.core.maps import pack_maps, save_map
from visattn.core.pipeline.asking import Asked
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared, prepare_with
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.running import explained, looked
from visattn.core.records import Recording
from visattn.errors import ImageError, MissingExtra, ModelError, OptionError, OutputError, ResourceError, VisattnError
from visattn.evaluation import PhotoNumbers, photo_numbers
from visattn.studies import View, attn_content, view_of

_T = TypeVar("_T")
_LONGEST = 255  # bytes of the name of a file
_OF_THE_PATH = {errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
_AHEAD = 2  # batches that are decoded before the model needs them, and batches that may wait to be written


class Batch(NamedTuple):
    """Images that run through the model together.

    Attributes:
        first: Number of the first in the run.
        items: The images.
    """

    first: int
    items: Sequence[Item]


class _Read(NamedTuple):
    """An image that was read, or why it was not, and the digest of its file."""

    item: Item
    sha256: str
    prepared: Prepared | VisattnError


class _Answered(NamedTuple):
    """An image with all that is written of it, or why nothing is.

    Attributes:
        number: Number of the image in the run.
        read: The image.
        answer: Its explanation, or the error.
        view: Its view in a study, if there is to be one.
        numbers: Its statistics, if they are wanted.
        part: Its part of a mean, if means are wanted.
    """

    number: int
    read: _Read
    answer: Explanation | VisattnError
    view: View | None = None
    numbers: PhotoNumbers | None = None
    part: means.Part | None = None


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
    threads: int = field(default=2, metadata=DECIDES_NOTHING)


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
    frames = means.Frames()

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
        answered = _answered(model, found, work, first)
        if first == 0:
            _check_alike(answered)
        frames.check(one.part for one in answered if one.part)
        writing.append((answered, [writers.submit(_write, one, work.wanted, spare) for one in answered]))
        while len(writing) > _AHEAD:
            yield settled()
    while writing:
        yield settled()


def _attempt(run: Callable[[], _T]) -> _T | VisattnError:
    """Run what concerns one image, whose error must not end the work on the others; return the result or the error."""
    try:
        return run()
    except VisattnError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)  # its frames hold tensors
    except Exception as error:
        return ResourceError("out of memory. Choose a smaller image.") if lacks_memory(error) else _fault(error)


def _fault(error: Exception) -> VisattnError:
    """Return the error that tells of a bug in visattn."""
    what = f"{type(error).__name__}: {first_line(error)}"
    return VisattnError(
        f"internal error of visattn ({what}). Please report it with the traceback of this image alone{flag('debug')}."
    )


def _read(item: Item, model: nn.Module, how: Preprocessing) -> _Read:
    """Decode and preprocess one image."""

    def read() -> tuple[str, Prepared]:
        photo = item.photo(**how.reading)
        return image_facts(photo).sha256, prepare_with([photo], model, how)

    found = _attempt(read)
    return _Read(item, "", found) if isinstance(found, VisattnError) else _Read(item, *found)


def _answered(model: nn.Module, found: Sequence[_Read], work: Work, first: int) -> list[_Answered]:
    """Explain the images of a batch that were read."""
    explanations = iter(_explained(model, [one.prepared for one in found if isinstance(one.prepared, Prepared)], work.asked))
    answers = [next(explanations) if isinstance(one.prepared, Prepared) else one.prepared for one in found]
    fine = [read.prepared for read, answer in zip(found, answers, strict=True) if isinstance(answer, Explanation)]
    recordings = iter(_recorded(model, fine, work.asked) if work.wanted.statistics else [None] * len(fine))
    return [
        _whole(model, number, one, answer, next(recordings), work)
        if isinstance(answer, Explanation)
        else _Answered(number, one, answer)
        for number, (one, answer) in enumerate(zip(found, answers, strict=True), start=first)
    ]


def _explained(model: nn.Module, prepared: Sequence[Prepared], asked: Asked) -> Sequence[Explanation | VisattnError]:
    """Explain images together; if one of them is at fault, each alone."""
    if not prepared:
        return []
    found = _attempt(lambda: explained(model, prepared, asked.question, seed=asked.seed))
    if not isinstance(found, VisattnError):
        return found
    return [_attempt(partial(_alone, model, one, asked)) for one in prepared]


def _alone(model: nn.Module, prepared: Prepared, asked: Asked) -> Explanation:
    """Explain one image."""
    return explained(model, [prepared], asked.question, seed=asked.seed)[0]


def _recorded(model: nn.Module, prepared: Sequence[Any], asked: Asked) -> Sequence[Recording | VisattnError]:
    """Record images together, with the terms of their scores if the method reads them; if one of them is at fault, each alone."""
    look = partial(looked, model, question=asked.question if asked.question.runs_alone == "terms" else None, seed=asked.seed)
    found = _attempt(lambda: look(prepared)) if prepared else []
    if not isinstance(found, VisattnError):
        return found
    return [_attempt(lambda one=one: look([one])[0]) for one in prepared]  # type: ignore[misc]


def _whole(
    model: nn.Module, number: int, one: _Read, answer: Explanation, recording: Recording | VisattnError | None, work: Work
) -> _Answered:
    """Return an image with its view and its statistics, or the error of one of them."""
    prepared, asked = one.prepared, work.asked
    assert isinstance(prepared, Prepared)  # noqa: S101 - it was explained
    view = _attempt(lambda: view_of(model, prepared, None, asked.question.target, asked.seed)) if work.wanted.study else None
    numbers = (
        _attempt(lambda: photo_numbers(recording, prepared, printable(one.item.source)))
        if isinstance(recording, Recording)
        else recording
    )
    if isinstance(view, VisattnError):
        return _Answered(number, one, view)
    if isinstance(numbers, VisattnError):
        return _Answered(number, one, numbers)
    by = work.wanted.means
    part = _attempt(lambda: means.part_of(answer, one.item.source, by)) if by else None
    if isinstance(part, VisattnError):
        return _Answered(number, one, part)
    return _Answered(number, one, answer, view, numbers, part)


def _check_alike(answered: Sequence[_Answered]) -> None:
    """Check that the images of the run's first batch do not all fail alike, as the model or an option is at fault.

    Raises:
        VisattnError: Their error.
    """
    errors = [one.answer for one in answered if isinstance(one.read.prepared, Prepared)]
    alike = {str(error) for error in errors if isinstance(error, (OptionError, ModelError, MissingExtra))}
    if len(errors) > 1 and len(alike) == 1 and all(str(error) in alike for error in errors):
        assert isinstance(errors[0], VisattnError)  # noqa: S101
        raise errors[0]


def _write(one: _Answered, wanted: Wanted, spare: Path) -> Entry:
    """Draw an explanation and write the files of an image; of one that fails, remove those of its earlier content."""
    item, digest = one.read.item, one.read.sha256
    files = wanted.of_image(item.name)
    made = one.answer if isinstance(one.answer, VisattnError) else _attempt(lambda: _made(one, files, wanted))
    if isinstance(made, VisattnError):
        for file in files.values():
            _remove(wanted.folder, file)
        return Entry(one.number, item.source, item.name, digest, error=first_line(made))
    assert isinstance(one.answer, Explanation)  # noqa: S101 - its content was made
    contents, warnings = made
    try:
        for what, file in files.items():
            _put(wanted.folder, file, contents[what], spare / f"{one.number}{Path(file).suffix}")
    except ImageError as error:
        return Entry(one.number, item.source, item.name, digest, error=first_line(error))
    outputs = {file: _digest(contents[what]) for what, file in files.items()}
    return Entry(one.number, item.source, item.name, digest, outputs, warnings=warnings, sample=sample_of(one.answer))


def sample_anew(model: nn.Module, item: Item, asked: Asked) -> Sequence[float | None]:
    """Explain an image alone, and return the sample of its map.

    Raises:
        VisattnError: If it cannot be explained.
    """
    prepared = prepare_with([item.photo(**asked.how.reading)], model, asked.how)
    return sample_of(_alone(model, prepared, asked))


def _made(one: _Answered, files: Mapping[str, str], wanted: Wanted) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the content of the files of an image, and warnings.

    Raises:
        ImageError: If the name of a file is too long.
    """
    answer = one.answer
    assert isinstance(answer, Explanation)  # noqa: S101
    longest = max((_bytes_of_name(file) for file in files.values()), default=0)
    if longest > _LONGEST:
        most = _bytes_of_name(one.read.item.name) - (longest - _LONGEST)
        raise ImageError(f"its name is too long for files that are named by it. Rename it to at most {most} bytes.")
    found: dict[str, bytes] = {}
    provenance = answer.provenance
    with torch.no_grad():
        if "picture" in files:
            picture, provenance = answer.draw(**wanted.drawing)
            found["picture"] = to_png(picture, provenance)
        if "raw" in files:
            found["raw"] = save_map(answer.map, answer.geometry, wanted.raw_ending)
        if one.view is not None:
            found["study"] = attn_content([one.view])
    return found, tuple(provenance.warnings)


def _bytes_of_name(file: str) -> int:
    return len(os.fsencode(Path(file).name))


def _of_batch(answered: Sequence[_Answered], entries: Sequence[Entry], wanted: Wanted, spare: Path) -> list[Entry]:
    """Write the files of a batch, and return the entries of its images, which name them too."""
    good = [one for one, entry in zip(answered, entries, strict=True) if not entry.error]
    files = wanted.of_batch(answered[0].number)
    make: dict[str, Callable[[], bytes]] = {
        "packed": lambda: pack_maps(
            (one.read.item.name, one.answer.map, one.answer.geometry) for one in good if isinstance(one.answer, Explanation)
        ),
        "statistics": lambda: statistics.serialized([one.numbers for one in good if one.numbers is not None]),
        "means": lambda: means.serialized(one.part for one in good if one.part is not None),
    }
    outputs: dict[str, str] = {}
    for what, file in files.items():
        if good:
            data = make[what]()
            _put(wanted.folder, file, data, spare / f"batch{Path(file).suffix}")
            outputs[file] = _digest(data)
        else:
            _remove(wanted.folder, file)
    return [entry if entry.error else entry._replace(outputs={**entry.outputs, **outputs}) for entry in entries]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _put(folder: Path, file: str, data: bytes, spare: Path) -> None:
    """Write a file that is complete or absent; what a kill leaves behind stays among the spare files.

    Raises:
        ImageError: If no file can have this path, or it leads elsewhere, which is a fault of one image.
        OutputError: If it cannot be written.
        ResourceError: If the disk is full.
    """
    write_whole(spare, data)
    path = folder / file
    _own(folder, file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(spare, path)
    except OSError as error:
        blocking = next((part for part in path.parents if exists(part) and not is_folder(part)), None)
        if blocking is not None:
            where = printable(str(blocking))
            raise ImageError(f"{where}: is no folder. Remove it, or choose another folder{flag('output')}.") from error
        if error.errno in _OF_THE_PATH:
            cause = (error.strerror or str(error)).lower()
            raise ImageError(f"{printable(str(path))}: cannot be written ({cause}). Rename the image.") from error
        refused = refusal(error, path)
        raise refused from error


def _remove(folder: Path, file: str) -> None:
    """Remove a file of a former run, if it is one and lies in the folder."""
    with suppress(ImageError, OSError):
        _own(folder, file).unlink(missing_ok=True)


def _own(folder: Path, file: str) -> Path:
    try:
        return inside(folder, file)
    except OutputError as error:
        raise ImageError(str(error)) from error
