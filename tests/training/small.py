"""A folder of tiny pictures, a recipe that learns them in a second, runs that break off where they are told, and commands in a fork."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from visattn.cli import commands
from visattn.errors import VisattnWarning
from visattn.training import Config, train
from visattn.training.trainer import Learner

TRAIN, TEST = 13, 5  # pictures: no multiple of a batch
EVERYTHING: dict[str, Any] = {
    "attention": "cbam",
    "opt": "adamw",
    "augment": "imagenet",
    "auto_augment": "rand-m9-mstd0.5",
    "reprob": 0.5,
    "mixup": 0.4,
    "cutmix": 1.0,
    "ema": 0.9,
    "accumulate": 2,
    "clip_grad": 1.0,
    "workers": 2,
    "epochs": 2.7,
}


def pictures(folder: Path, train: int = TRAIN, test: int = TEST, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """A folder of noise, darker for one class than for the other."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        for number in range(count):
            label = number % len(classes)
            pixels = random.integers(0, 120, (18, 20, 3), dtype=np.uint8) + np.uint8(100 * (label == 1))
            path = folder / split / classes[label] / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return folder


def recipe(data: Path, **changes: Any) -> Config:
    """Eight steps over 13 pictures, a state after every second and at the end of each epoch."""
    plain = Config(
        data=str(data),
        img_size=16,
        model="visattn_resnet14",
        widths=(4, 4, 8),
        epochs=2.5,
        batch_size=4,
        lr=0.05,
        augment="none",
        log_every=2,
        save_every=2,
        max_bad=0.2,
        device="cpu",
    )
    return replace(plain, **changes)


class Crash(Exception):
    """What `begun` ends with."""


@contextmanager
def before_step(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Have something happen in each training before its step of this number, counted from 0."""
    learn = Learner.learn

    def acting(self: Learner, parts: Any, step: int) -> torch.Tensor:
        if step == number:
            act()
        return learn(self, parts, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "learn", acting)
        yield


def _crash() -> None:
    raise Crash


def begun(config: Config, run: Path, steps: int = 5) -> Path:
    """A run that broke off after some steps."""
    with before_step(steps, _crash), pytest.raises(Crash):
        train(config, run)
    return run


def states(run: Path) -> list[Path]:
    """Folders of the states of a run, the newest last."""
    return sorted((run / "checkpoints").glob("step_*"))


def content(run: Path) -> dict[str, Any]:
    """All that two runs of one recipe must have in common: facts, tensors as their bytes, files."""
    last = states(run)[-1]
    facts = json.loads((last / "state.json").read_text())
    facts["facts"]["config"]["workers"] = None  # reads pictures, changes nothing
    for name in ("sha256", "own_sha256"):
        facts.pop(name)
    result = json.loads((run / "result.json").read_text())
    result.pop("images_per_second")
    found: dict[str, Any] = {"last": last.name, "facts": facts, "result": result}
    for path in sorted(last.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name)
                found[f"{path.stem} {name}"] = (tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes())
    for file_name in ("final/model.safetensors", "final/model.json", "log.jsonl", "log.csv"):
        found[file_name] = (run / file_name).read_bytes()
    return found


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two contents differ in; empty if in nothing."""
    return sorted(name for name in {*one, *other} if name not in one or name not in other or one[name] != other[name])


class Ended(NamedTuple):
    """How a command ended: its exit code, or minus the signal that ended it, and what it wrote."""

    code: int
    text: str


def fork(act: Callable[[], int], log: Path) -> int:
    """The id of a new process that does something, writes to a file, and ends with what it returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of Python warn of threads
        child = os.fork()
    if child:
        return child
    code = 70
    try:
        out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        code = act()
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(child: int, log: Path) -> Ended:
    """How a process ended, once it has."""
    _, status = os.waitpid(child, 0)
    return Ended(os.waitstatus_to_exitcode(status), log.read_text() if log.exists() else "")


def command(*arguments: object) -> int:
    """The exit code of `visattn train classify`, run in this process."""
    warnings.showwarning = commands._show_warning  # type: ignore[assignment]
    warnings.simplefilter("always", VisattnWarning)
    return commands._run(["train", "classify", "-q", *map(str, arguments)], debug=False)


def forked(*arguments: object) -> Ended:
    """`visattn train classify` in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        return ended(fork(lambda: command(*arguments), log), log)


def written(config: Config, path: Path) -> Path:
    """A recipe as a file."""
    path.write_text(config.toml())
    return path


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition came true within a time."""
    import time

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def children(process: int) -> list[int]:
    """Processes that another one started."""
    try:
        return [int(text) for text in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def kill(process: int) -> None:
    """End a process without a last word."""
    os.kill(process, signal.SIGKILL)
