"""The folder of a run: who may write in it, which recipe it is of, and what is there when the run is over."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from visattn._checks import printable
from visattn._files import check_output, regular, write_whole
from visattn._tables import to_json
from visattn.errors import OptionError, OutputError
from visattn.training._config import Recipe, differences, read_config

CONFIG, RESULT, LOG, SPEED, FINAL, CARD = "config.toml", "result.json", "log.jsonl", "speed.jsonl", "final", "README.md"
NONFINITE = "nonfinite*.jsonl"  # of each process that met such a loss


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
    """Have a run's folder for oneself.

    Raises:
        OutputError: If it is no folder of a run, cannot be written, or another process trains in it.
    """
    name = printable(str(run))
    if run.is_dir() and not (run / CONFIG).exists() and any(not item.name.startswith(".") for item in run.iterdir()):
        raise OutputError(f"{name}: holds other files than a run's; choose another -o/--output")
    check_output(run / ".lock", overwrite=True)
    with (run / ".lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: workers would hold it on when this process is killed
        except (BlockingIOError, PermissionError) as error:
            raise OutputError(f"{name}: another process is training here; wait for it, or choose another -o/--output") from error
        for rest in run.glob(".visattn-*"):  # what a killed process left
            shutil.rmtree(rest) if rest.is_dir() else rest.unlink(missing_ok=True)
        yield


def claim(run: Path, config: Recipe, *, force: bool) -> None:
    """Write the recipe into a new folder; compare it with that of an old one.

    Raises:
        OptionError: If the run was begun with another recipe, which `force` allows.
        OutputError: If the folder cannot be written.
    """
    path = run / CONFIG
    if path.exists() and not force:
        before = type(config)(**read_config(path, type(config))).digest()
        check_same(run, differences(before, config))
    write_whole(path, config.toml().encode())


def check_same(run: Path, different: list[str]) -> None:
    """Refuse to go on where something differs.

    Raises:
        OptionError: If so; the message lists it.
    """
    if different:
        way = "--overwrite to begin anew: it is over" if finished(run) else "--force to go on so"
        raise OptionError(
            f"{printable(str(run))}: was begun otherwise: {'; '.join(different)}. Choose another -o/--output, or pass {way}."
        )


def finished(run: Path) -> Result | None:
    """The result of a run that is over."""
    try:
        told = json.loads(regular(run / RESULT).read_text())
        return Result(**{**told, "bad": tuple(told["bad"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def finish(run: Path, result: Result) -> Result:
    """Write the result, which says that the run is over."""
    write_whole(run / RESULT, to_json(asdict(result)).encode())
    return result


def clear(run: Path) -> None:
    """Remove what an earlier run left, to begin anew.

    Raises:
        OutputError: If the folder holds other files than a run's.
    """
    known = {CONFIG, RESULT, LOG, SPEED, FINAL, CARD, "log.csv", "curves.png", "checkpoints", "maps", ".lock"}
    ours = [item for item in run.iterdir() if item.name in known or item.match(NONFINITE)] if run.is_dir() else []
    strange = sorted(item.name for item in run.iterdir() if item not in ours) if run.is_dir() else []
    if strange:
        raise OutputError(
            f"{printable(str(run))}: holds {printable(strange[0])}, which would be lost; choose another -o/--output"
        )
    order = {RESULT: 0, CONFIG: 2, ".lock": 3}  # killed in between, it is a run without a result, which can be cleared again
    for item in sorted(run.iterdir(), key=lambda item: (order.get(item.name, 1), item.name)) if run.is_dir() else ():
        if item.name == ".lock":
            continue
        shutil.rmtree(item) if item.is_dir() else item.unlink()


def remove(path: Path) -> None:
    """A folder, if it is there."""
    if path.exists():
        shutil.rmtree(path)
