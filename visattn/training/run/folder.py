"""Folder of a run: its lock, its settings, and its result."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from visattn._support.checks import printable
from visattn._support.json_files import Amount, Count, Finite, Share, converted, decoded
from visattn._support.language import flag, option
from visattn._support.tables import to_json
from visattn._support.untrusted import check_own, open_own, read_own
from visattn._support.whole_files import check_output, discard, refusal, write_whole
from visattn.errors import OptionError, OutputError
from visattn.training.config import Recipe, differences, read_config

CONFIG, RESULT, LOG, SPEED, FINAL, CARD = "config.toml", "result.json", "log.jsonl", "speed.jsonl", "final", "README.md"
TABLE, CURVES, STATES, MAPS = "log.csv", "curves.png", "checkpoints", "maps"
CLASSES, CONFUSION, MATRIX, BOARD = "classes.csv", "confusion.csv", "confusion.png", "tensorboard"
_LOCK = ".lock"
_FILES = (
    CONFIG,
    RESULT,
    LOG,
    SPEED,
    CARD,
    TABLE,
    CURVES,
    CLASSES,
    CONFUSION,
    MATRIX,
    _LOCK,
    "nonfinite*.jsonl",
)  # the last: one file for each process with a nonfinite loss
_FOLDERS = (FINAL, STATES, MAPS, BOARD)


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Attributes:
        accuracy: Accuracy on the test images, from 0 to 1; for captioners, accuracy of the words.
        loss: Mean cross-entropy on the test images, in nats; for captioners, per word.
        images_per_second: Training throughput, the median over the run.
        parameters: Number of parameters of the network.
        steps: Number of optimizer steps.
        bad: Messages about images that could not be read.
        stopped: Signal that stopped the run early; 0 if the run finished.
        top5: Share of the test images whose class is among the first five; None for captioners, and if there are no more classes.
    """

    accuracy: Share
    loss: Finite
    images_per_second: Amount
    parameters: Count
    steps: Count
    bad: tuple[str, ...] = ()
    stopped: int = 0
    top5: Share | None = None


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder of a run. If no run was started, restore the folder on exit.

    Raises:
        OutputError: If the folder contains other files, cannot be written, is a link, or another process trains in it.
    """
    name = printable(str(run))
    check_own(run, _FILES, _FOLDERS)
    made = [place for place in (run / MAPS, run, *run.parents) if not os.path.lexists(place)]
    try:
        check_output(run / _LOCK, overwrite=True)
        if not (run / CONFIG).exists() and any(not item.name.startswith(".") for item in run.iterdir()):
            raise OutputError(f"{name}: holds files that do not belong to a run; choose another folder{flag('output')}")
        with _locked(run):
            yield
    finally:
        for place in made:
            with suppress(OSError, ValueError):  # not empty, or an invalid name
                place.rmdir()


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Hold the lock file of a folder. Remove the file on exit if no run was started.

    Raises:
        OutputError: If another process holds the lock.
    """
    try:
        lock = os.fdopen(open_own(run / _LOCK, os.O_RDWR | os.O_CREAT), "w")
    except OSError as error:
        refused = refusal(error, run / _LOCK)
        raise refused from error
    with lock:
        try:
            fcntl.lockf(
                lock, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # not flock: workers would inherit it and keep it if this process is killed
            ours = os.path.samestat(
                os.fstat(lock.fileno()), (run / _LOCK).stat()
            )  # its previous holder may have removed the file
        except (BlockingIOError, PermissionError, FileNotFoundError):
            ours = False
        if not ours:
            raise OutputError(
                f"{printable(str(run))}: another process is training here; wait for it, or choose another folder{flag('output')}"
            )
        try:
            for rest in run.glob(".visattn-*"):  # leftovers of a killed process
                discard(rest)
            yield
        finally:
            if not (run / CONFIG).exists():
                (run / _LOCK).unlink(missing_ok=True)


def check_recipe(run: Path, config: Recipe) -> None:
    """Check that the settings match those of the run in the folder, if there is one.

    Raises:
        OptionError: If the run was started with other settings.
    """
    if any(
        (run / name).exists() for name in (LOG, RESULT, STATES)
    ):  # otherwise the run was killed before its first checkpoint or log row
        before = type(config)(**read_config(run / CONFIG, type(config))).digest()
        check_same(run, differences(before, config))


def claim(run: Path, config: Recipe) -> None:
    """Write the settings into the folder. From then on it belongs to a run.

    Raises:
        OutputError: If the folder cannot be written.
    """
    write_whole(run / CONFIG, config.toml().encode())


def check_same(run: Path, different: list[str]) -> None:
    """Check that the list of differences to the run in the folder is empty.

    Raises:
        OptionError: If it is not. The message lists the differences.
    """
    if different:
        way = (
            f"{option('overwrite', True)} to start again, because this run is finished"
            if finished(run)
            else f"{option('force', True)} to resume anyway"
        )
        raise OptionError(
            f"{printable(str(run))}: was started with other settings: {'; '.join(different)}. "
            f"Choose another folder{flag('output')}, or pass {way}."
        )


def finished(run: Path) -> Result | None:
    """Read the result of a finished run. Return None if the run is not finished."""
    try:
        told = decoded(read_own(run / RESULT), dict[str, Any], lax=True)
        found = converted(told, Result)
    except (OSError, ValueError):
        return None
    return found if found.stopped == 0 and told.keys() <= vars(found).keys() else None


def finish(run: Path, result: Result) -> Result:
    """Write the result, which marks the run as finished, and return it."""
    write_whole(run / RESULT, to_json(asdict(result)).encode())
    return result


def check_clear(run: Path) -> None:
    """Check that a folder holds only files of a run, so that it can be cleared.

    Raises:
        OutputError: If it holds other files. The message names one.
    """
    strange = sorted(item.name for item in run.iterdir() if not any(map(item.match, (*_FILES, *_FOLDERS))))
    if strange:
        raise OutputError(
            f"{printable(str(run))}: holds {printable(strange[0])}, which would be lost; choose another folder{flag('output')}"
        )


def clear(run: Path, but: Collection[str] = ()) -> None:
    """Remove the files of an earlier run. Folders named in `but` are emptied and kept. See `check_clear`."""
    check_clear(run)
    order = {RESULT: 0, CONFIG: 2}  # if killed in between, an unfinished run remains, which can be cleared again
    for item in sorted(run.iterdir(), key=lambda item: (order.get(item.name, 1), item.name)):
        if item.name != _LOCK:
            discard(item)
        if item.name in but:
            item.mkdir()
