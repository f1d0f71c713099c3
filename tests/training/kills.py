"""Tests that kill trainings repeatedly at random moments: `python -m tests.training.kills saves 200`, or `... runs 20`.

`saves` kills a process that only saves checkpoints. `runs` kills complete trainings, resumes each to its end, and compares the result
with that of an uninterrupted training.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.training.small import EVERYTHING, content, different, ended, fork, kill, pictures, recipe, states
from visattn.training import Checkpoints, Config, State, train
from visattn.training.run.checkpoints import readable

_SIZES = {"model": (3000, 7), "optimizer": (20000,), "random0": (5000,)}


class Survived(Exception):
    """Failure to survive a kill, with a description."""


def state_of(step: int) -> State:
    """Build a checkpoint in which every number equals its step."""
    return State(step, {"seen": step * 4}, {name: {"all": torch.full(size, float(step))} for name, size in _SIZES.items()})


def saves(count: int, folder: Path, seed: int = 0) -> Counter[str]:
    """Kill a process that saves checkpoints continuously. Check that the newest one is intact and includes every completed save.

    Returns:
        Number of kills during a save, and between saves.

    Raises:
        Survived: If a checkpoint was lost.
    """
    moments, seen, checkpoints = random.Random(seed), Counter[str](), Checkpoints(folder / "checkpoints")
    first = 1
    for _ in range(count):
        promised, moment = _kill_saving(checkpoints, first, folder / "log", moments)
        names = sorted(path.name for path in checkpoints.folder.iterdir())
        left = [name for name in names if name.startswith(".visattn-")]
        whole = [name for name in names if name.startswith("step_") and readable(checkpoints.folder / name)]
        if len(left) > 1 or sorted(left + whole) != names:
            raise Survived(f"after {moment}: {names}, of which whole: {whole}")
        latest = checkpoints.latest()
        if latest is None or not promised <= latest.step <= promised + 1:
            raise Survived(f"after {moment}: step {promised} was saved, the newest is {latest and latest.step}")
        expected = state_of(latest.step)
        same = all(torch.equal(latest.tensors[name]["all"], expected.tensors[name]["all"]) for name in _SIZES)
        if latest.facts != expected.facts or not same:
            raise Survived(f"after {moment}: step {latest.step} holds something else")
        seen["in a save" if left else "between saves"] += 1
        checkpoints.tidy()
        if [path for path in checkpoints.folder.iterdir() if path.name not in whole]:
            raise Survived(f"after {moment}: {left} is still there")
        first = latest.step + 1
    return seen


def _kill_saving(checkpoints: Checkpoints, first: int, log: Path, moments: random.Random) -> tuple[int, str]:
    """Return the last step saved before the process was killed, and the moment of the kill."""
    reading, writing = os.pipe()

    def save_on() -> int:
        os.close(reading)
        step = first
        while True:
            checkpoints.save(state_of(step))
            os.write(writing, struct.pack("q", step))
            step += 1

    child = fork(save_on, log)
    os.close(writing)
    told = os.read(reading, 8)  # at least one save, so that there is something to lose
    wait = moments.random() * 0.05
    time.sleep(wait)
    kill(child)
    status = ended(child, log)
    while more := os.read(reading, 8):
        told = more
    os.close(reading)
    if status.code != -9 or not told:
        raise Survived(f"the saving process ended by itself: {status}")
    return struct.unpack("q", told)[0], f"{wait * 1000:.1f} ms"


def runs(count: int, folder: Path, seed: int = 0, **changes: Any) -> tuple[Counter[str], int]:
    """Kill trainings at random moments, resume them, and compare each finished one with an uninterrupted training.

    Returns:
        Number of kills in each phase, and number of trainings compared.

    Raises:
        Survived: If a training ended with another result, or could not be resumed.
    """
    config = recipe(pictures(folder / "data"), **(EVERYTHING | changes))
    began = time.monotonic()
    _train_until_the_end(config, folder / "unbroken", folder / "unbroken.log")
    whole = time.monotonic() - began
    expected, places, moments, compared = content(folder / "unbroken"), Counter[str](), random.Random(seed), 0
    while True:
        run, log = folder / f"broken{compared}", folder / f"broken{compared}.log"
        while places.total() < count:
            child = fork(lambda run=run: _trained(config, run), log)  # type: ignore[misc]
            time.sleep(moments.random() * whole * 0.8)
            with contextlib.suppress(ProcessLookupError):
                kill(child)
            status = ended(child, log)
            if status.code == 0:  # the training finished before the kill
                break
            if status.code != -9:
                raise Survived(f"{run.name} could not go on: {status.text}")
            places[_place(run)] += 1
        _train_until_the_end(config, run, log)
        compared += 1
        if wrong := different(content(run), expected):
            raise Survived(f"{run.name}, after {dict(places)}, differs in {', '.join(wrong)}")
        if places.total() >= count:
            return places, compared


def _trained(config: Config, run: Path) -> int:
    torch.set_num_threads(1)
    train(config, run)
    return 0


def _train_until_the_end(config: Config, run: Path, log: Path) -> None:
    if (status := ended(fork(lambda: _trained(config, run), log), log)).code:
        raise Survived(f"{run.name} could not be finished: {status.text}")


def _place(run: Path) -> str:
    """Return the phase in which a training was killed, based on the files it left."""
    if list(run.glob("checkpoints/.visattn-*")):
        return "in a save"
    if list(run.glob(".visattn-*")) or (run / "final").exists():
        return "at the end"
    return "between saves" if states(run) else "before the first save"


@contextlib.contextmanager
def _place_to_work() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as place:
        yield Path(place)


def main(arguments: list[str]) -> int:
    """Run one of the loops and print the counts."""
    kind, count = arguments[0], int(arguments[1])
    torch.set_num_threads(1)
    with _place_to_work() as folder:
        try:
            if kind == "saves":
                print(f"{count} kills of a saving process, 0 states lost: {_told(saves(count, folder))}")  # noqa: T201
            else:
                places, compared = runs(count, folder, epochs=30.5)  # long compared with the phases before and after it
                print(f"{count} kills of trainings, {compared} of {compared} trainings equal to the last bit: {_told(places)}")  # noqa: T201
        except Survived as error:
            print(f"{kind}: {error}")  # noqa: T201
            return 1
    return 0


def _told(places: Counter[str]) -> str:
    return ", ".join(f"{number} {place}" for place, number in sorted(places.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
