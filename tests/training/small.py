"""Helpers: a folder of tiny images, settings that train on them in a second, interrupted runs, and commands in a forked process."""

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
from functools import partial
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
from visattn.training.trainer import Trainer

TRAIN, TEST = 13, 5  # images; not a multiple of the batch size
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
    """Write a folder of noise images, darker for one class than for the other."""
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
    """Return settings for eight steps over 13 images, with a checkpoint every two steps and after each epoch."""
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
        max_unreadable=0.2,
        device="cpu",
    )
    return replace(plain, **changes)


class Crash(Exception):
    """Exception that interrupts a run in `begun`."""


@contextmanager
def before_step(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Call a function in each training before the step with this number, counted from 0."""
    learn = Trainer.learn

    def acting(self: Trainer, parts: Any, step: int, stepping: Any) -> torch.Tensor:
        if step == number:
            act()
        return learn(self, parts, step, stepping)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "learn", acting)
        yield


def _crash() -> None:
    raise Crash


def begun(config: Config, run: Path, steps: int = 5) -> Path:
    """Train a run that is interrupted after some steps, and return its folder."""
    with before_step(steps, _crash), pytest.raises(Crash):
        train(config, run)
    return run


def states(run: Path) -> list[Path]:
    """List the checkpoint folders of a run, the newest last."""
    return sorted((run / "checkpoints").glob("step_*"))


def content(run: Path) -> dict[str, Any]:
    """Read everything that must be equal in two runs with the same settings: facts, bytes of tensors, files."""
    last = states(run)[-1]
    facts = json.loads((last / "state.json").read_text())
    facts["facts"]["config"]["workers"] = None  # affects only how images are read
    for name in ("sha256", "own_sha256"):
        facts.pop(name)
    result = json.loads((run / "result.json").read_text())
    result.pop("images_per_second")
    found: dict[str, Any] = {"last": last.name, "facts": facts, "result": result}
    for path in sorted(last.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - the object is not a mapping
                tensor = file.get_tensor(name)
                found[f"{path.stem} {name}"] = (tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes())
    for file_name in ("final/model.safetensors", "final/model.json", "log.jsonl", "log.csv"):
        found[file_name] = (run / file_name).read_bytes()
    return found


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """List the differences of two contents."""
    return sorted(name for name in {*one, *other} if name not in one or name not in other or one[name] != other[name])


class Ended(NamedTuple):
    """End of a command: its exit code, or minus the signal that ended it, and its output."""

    code: int
    text: str


def fork(act: Callable[[], int], log: Path) -> int:
    """Fork a process that calls a function, writes its output to a file, and exits with the result. Return its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of Python warn about forks with threads
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
    """Wait for a process, and return how it ended."""
    _, status = os.waitpid(child, 0)
    return Ended(os.waitstatus_to_exitcode(status), log.read_text() if log.exists() else "")


def command(*arguments: object) -> int:
    """Run `visattn train classify` in this process, and return its exit code."""
    warnings.showwarning = partial(commands._show_warning, set())
    warnings.simplefilter("always", VisattnWarning)
    return commands._run(["train", "classify", "-q", *map(str, arguments)], debug=False)


def forked(*arguments: object) -> Ended:
    """Run `visattn train classify` in a forked process."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        return ended(fork(lambda: command(*arguments), log), log)


def written(config: Config, path: Path) -> Path:
    """Write the settings to a TOML file."""
    path.write_text(config.toml())
    return path


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition is true. Return False if it takes too long."""
    import time

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def children(process: int) -> list[int]:
    """List the child processes of a process."""
    try:
        return [int(text) for text in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def kill(process: int) -> None:
    """Kill a process with SIGKILL."""
    os.kill(process, signal.SIGKILL)
