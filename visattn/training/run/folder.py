"""The folder of a run: who may write in it, which recipe it is of, and what is there when the run is over."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from visattn._support.checks import printable
from visattn._support.files import check_output, check_own, discard, open_own, read_own, refusal, write_whole
from visattn._support.tables import to_json
from visattn.errors import OptionError, OutputError
from visattn.training.config import Recipe, differences, read_config

CONFIG, RESULT, LOG, SPEED, FINAL, CARD = "config.toml", "result.json", "log.jsonl", "speed.jsonl", "final", "README.md"
TABLE, CURVES, STATES, MAPS = "log.csv", "curves.png", "checkpoints", "maps"
_LOCK = ".lock"
_FILES = (
    CONFIG,
    RESULT,
    LOG,
    SPEED,
    CARD,
    TABLE,
    CURVES,
    _LOCK,
    "nonfinite*.jsonl",
)  # the last of each process that met such a loss
_FOLDERS = (FINAL, STATES, MAPS)


@dataclass(frozen=True)
class Result:
    """What a run reached.

    Attributes:
        accuracy: Share of the test pictures that are told right, from 0 to 1; of their words, for captions.
        loss: Mean cross-entropy on them, in nats.
        images_per_second: Training throughput, the median over the run.
        parameters: Of the network.
        steps: Of the optimizer.
        bad: Pictures that could not be read, with the reason.
        stopped: The signal that stopped the run before its end, 0 if it is finished.
    """

    accuracy: float
    loss: float
    images_per_second: float
    parameters: int
    steps: int
    bad: tuple[str, ...] = ()
    stopped: int = 0


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Have a run's folder for oneself; if nothing was begun in it, it is afterward as it was before.

    Raises:
        OutputError: If it is no folder of a run, cannot be written, leads elsewhere, or another process trains in it.
    """
    name = printable(str(run))
    check_own(run, _FILES, _FOLDERS)
    made = [place for place in (run / MAPS, run, *run.parents) if not os.path.lexists(place)]
    try:
        check_output(run / _LOCK, overwrite=True)
        if not (run / CONFIG).exists() and any(not item.name.startswith(".") for item in run.iterdir()):
            raise OutputError(f"{name}: holds other files than a run's; choose another folder (-o/--output)")
        with _locked(run):
            yield
    finally:
        for place in made:
            with suppress(OSError, ValueError):  # it holds something, or its name cannot be
                place.rmdir()


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Hold the lock of a folder, and remove it where nothing was begun.

    Raises:
        OutputError: If another process holds it.
    """
    try:
        lock = os.fdopen(open_own(run / _LOCK, os.O_RDWR | os.O_CREAT), "w")
    except OSError as error:
        refused = refusal(error, run / _LOCK)
        raise refused from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: workers would hold it on when this process is killed
            ours = os.path.samestat(os.fstat(lock.fileno()), (run / _LOCK).stat())  # who had it before may have removed it
        except (BlockingIOError, PermissionError, FileNotFoundError):
            ours = False
        if not ours:
            raise OutputError(
                f"{printable(str(run))}: another process is training here; wait for it, or choose another folder (-o/--output)"
            )
        try:
            for rest in run.glob(".visattn-*"):  # what a killed process left
                discard(rest)
            yield
        finally:
            if not (run / CONFIG).exists():
                (run / _LOCK).unlink(missing_ok=True)


def check_recipe(run: Path, config: Recipe) -> None:
    """Compare the recipe with that of a run that was begun.

    Raises:
        OptionError: If the run was begun with another recipe.
    """
    if any((run / name).exists() for name in (LOG, RESULT, STATES)):  # else a kill left nothing but the recipe
        before = type(config)(**read_config(run / CONFIG, type(config))).digest()
        check_same(run, differences(before, config))


def claim(run: Path, config: Recipe) -> None:
    """Write the recipe into the folder, which is a run's from then on.

    Raises:
        OutputError: If the folder cannot be written.
    """
    write_whole(run / CONFIG, config.toml().encode())


def check_same(run: Path, different: list[str]) -> None:
    """Refuse to go on where something differs.

    Raises:
        OptionError: If so; the message lists it.
    """
    if different:
        way = "overwrite=True (--overwrite) to begin anew: it is over" if finished(run) else "force=True (--force) to go on so"
        raise OptionError(
            f"{printable(str(run))}: was begun otherwise: {'; '.join(different)}. Choose another folder (-o/--output), or pass {way}."
        )


def finished(run: Path) -> Result | None:
    """The result of a run that is over."""
    try:
        told = json.loads(read_own(run / RESULT))
        found = Result(**{**told, "bad": tuple(told["bad"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    whole = (
        all(type(value) in (int, float) for value in (found.accuracy, found.loss, found.images_per_second))
        and 0 <= found.accuracy <= 1
        and abs(found.loss) < math.inf
        and 0 <= found.images_per_second < math.inf
        and all(type(value) is int and 0 <= value < 2**63 for value in (found.parameters, found.steps))
        and isinstance(told["bad"], list)
        and all(isinstance(message, str) for message in found.bad)
        and found.stopped == 0
    )
    return found if whole else None


def finish(run: Path, result: Result) -> Result:
    """Write the result, which says that the run is over."""
    write_whole(run / RESULT, to_json(asdict(result)).encode())
    return result


def check_clear(run: Path) -> None:
    """Refuse to clear a folder that holds other files than a run's.

    Raises:
        OutputError: If it does; the message names one.
    """
    strange = sorted(item.name for item in run.iterdir() if not any(map(item.match, (*_FILES, *_FOLDERS))))
    if strange:
        raise OutputError(
            f"{printable(str(run))}: holds {printable(strange[0])}, which would be lost; choose another folder (-o/--output)"
        )


def clear(run: Path, but: Collection[str] = ()) -> None:
    """Remove what an earlier run left, to begin anew; folders of the names `but` stay, empty. See `check_clear`."""
    check_clear(run)
    order = {RESULT: 0, CONFIG: 2}  # killed in between, it is a run without a result, which can be cleared again
    for item in sorted(run.iterdir(), key=lambda item: (order.get(item.name, 1), item.name)):
        if item.name != _LOCK:
            discard(item)
        if item.name in but:
            item.mkdir()
