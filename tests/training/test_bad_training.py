"""Failures during training, from the command line: nonfinite losses, damaged checkpoints, unreadable images, clocks, dead workers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from PIL import Image

from tests.cli.test_commands import Run
from tests.training.classifying import Classify, told
from tests.training.small import (
    before_step,
    begun,
    children,
    command,
    content,
    different,
    ended,
    fork,
    kill,
    recipe,
    states,
    wait_for,
    written,
)
from tests.training.test_checkpoint import cut_file, damage_file
from visattn.errors import ResourceError, TrainingError, VisattnWarning
from visattn.training import Config, train

POISONED = """
import torch
from torch import nn

class Poisoned(nn.Module):
    '''Returns NaN for an image of a single color; with MODE backward, only its gradient is NaN.'''

    def __init__(self, classes, channels):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, classes)

    def forward(self, pixels):
        flat = (pixels.flatten(2).var(2) < 1e-6).all(1)
        x = self.first(pixels)
        if MODE == "forward":
            return self.after(x * torch.where(flat, torch.nan, 1.0)[:, None, None, None])
        nothing = self.first.weight.sum() * 0  # sqrt has no finite gradient at 0
        return self.after(x + 0 * torch.where(flat, nothing, nothing + 1).sqrt()[:, None, None, None])

    def after(self, x):
        return self.last(self.norm(x).relu().mean((2, 3)))

def small(num_classes, in_channels):
    return Poisoned(num_classes, in_channels)
"""


@pytest.fixture
def poisoned(data: Path, tmp_path: Path) -> Callable[..., Config]:
    """Return settings and data with one image, of a single color, that causes a nonfinite loss or gradient."""
    folder = Path(shutil.copytree(data, tmp_path / "flat"))
    Image.new("RGB", (20, 18), (9, 9, 9)).save(folder / "train" / "cat" / "04.png")

    def make(mode: str, **changes: Any) -> Config:
        (tmp_path / "own.py").write_text(POISONED.replace("MODE", repr(mode)))
        return recipe(folder, model=f"{tmp_path}/own.py:small", widths=(), save_every=1, **changes)

    return make


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def all_finite(place: Path) -> bool:
    return all(tensor.isfinite().all() for tensor in safetensors.torch.load_file(place / "model.safetensors").values())


def test_nan_loss_stops_the_run_and_names_its_images(run: Run, poisoned: Callable[..., Config], tmp_path: Path) -> None:
    config = poisoned("forward")
    file = written(config, tmp_path / "recipe.toml")
    code, out, err = run("train", "classify", "-q", "--config", file, "--model", config.model, "-o", "run")
    assert (code, out) == (4, "")
    assert "the loss is nan near step" in told(err)
    (row,) = rows(tmp_path / "run" / "nonfinite.jsonl")
    assert any(name.endswith("cat/04.png") for name in row["pictures"])
    assert len(row["numbers"]) == 4
    for place in states(tmp_path / "run"):
        assert int(place.name[5:]) < row["step"]
        assert all_finite(place)
    assert not (tmp_path / "run" / "final").exists()


def test_skipped_nan_steps_leave_weights_and_batch_norms_finite(poisoned: Callable[..., Config], tmp_path: Path) -> None:
    result = train(poisoned("forward", nonfinite="skip"), tmp_path / "run")
    assert result.steps == 8
    assert math.isfinite(result.loss)
    bad = rows(tmp_path / "run" / "nonfinite.jsonl")
    assert len(bad) == 2  # once in each of two epochs
    assert all(any(name.endswith("cat/04.png") for name in row["pictures"]) for row in bad)
    assert all_finite(tmp_path / "run" / "final")
    again = begun(poisoned("forward", nonfinite="skip"), tmp_path / "again")
    train(poisoned("forward", nonfinite="skip"), again)
    assert not different(content(again), content(tmp_path / "run"))


def test_too_many_consecutive_nan_steps_stop_the_run(poisoned: Callable[..., Config], data: Path, tmp_path: Path) -> None:
    config = poisoned("forward", nonfinite="skip", epochs=20.0)
    for path in (tmp_path / "flat" / "train").rglob("*.png"):
        Image.new("RGB", (20, 18), (9, 9, 9)).save(path)
    with pytest.raises(TrainingError, match=r"the loss is nan near step 11\."):
        train(config, tmp_path / "run")
    assert len(rows(tmp_path / "run" / "nonfinite.jsonl")) == 11


def test_nan_weights_are_not_saved_even_with_a_finite_loss(poisoned: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"first\.weight: must hold finite numbers, got NaN or infinity") as caught:
        train(poisoned("backward"), tmp_path / "run")
    assert caught.value.exit_code == 4
    assert all(all_finite(place) for place in states(tmp_path / "run"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("state.json", damage_file),
        ("model.safetensors", damage_file),
        ("optimizer.safetensors", cut_file),
        ("ema.safetensors", Path.unlink),
        ("random0.safetensors", damage_file),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_damaged_last_checkpoint_warns_and_the_result_is_the_same(
    classify: Classify, copied: Path, unbroken: dict[str, Any], file: str, spoil: Callable[[Path], object]
) -> None:
    spoil(copied / "checkpoints" / "step_00000004" / file)
    with pytest.warns(VisattnWarning, match=rf"step_00000004/{file}: .*; resuming from an earlier checkpoint, step 2$"):
        code, _, err = classify()
    assert (code, err) == (0, "")
    assert not different(content(copied), unbroken)


def test_run_does_not_restart_if_all_checkpoints_are_damaged(classify: Classify, copied: Path) -> None:
    for place in states(copied):
        damage_file(place / "model.safetensors")
    before = {
        path: path.read_bytes() for path in copied.rglob("*") if path.is_file() and path.suffix in (".jsonl", ".safetensors")
    }
    code, out, err = classify()
    assert (code, out) == (4, "")
    assert "All checkpoints of this run are damaged. Restore one, or start again in another folder (-o/--output)." in told(err)
    assert {path: path.read_bytes() for path in before} == before
    assert not (copied / "final").exists()


@pytest.fixture
def spoilt(data: Path, tmp_path: Path) -> Path:
    """Return a dataset with one unreadable training image and one unreadable test image."""
    folder = Path(shutil.copytree(data, tmp_path / "spoilt"))
    (folder / "train" / "dog" / "03.png").write_bytes(b"no picture")
    (folder / "test" / "cat" / "02.png").write_bytes(b"")
    return folder


def test_bad_images_are_named_and_skipped(classify: Classify, spoilt: Path, tmp_path: Path) -> None:
    code, out, err = classify(data=spoilt)
    assert code == 1
    assert "test accuracy" in out
    lines = err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("visattn: error: ") for line in lines)
    assert sorted(name for name in ("train/dog/03.png", "test/cat/02.png") if any(name in line for line in lines)) == [
        "test/cat/02.png",
        "train/dog/03.png",
    ]
    finished = json.loads((tmp_path / "run" / "result.json").read_text())
    assert len(finished["bad"]) == 2
    assert finished["accuracy"] * 4 == round(finished["accuracy"] * 4)  # of the four readable images
    assert classify(data=spoilt)[0] == 1  # the run is finished, but its unreadable images are still reported


@pytest.mark.full
def test_bad_image_counts_are_the_same_after_a_crash(spoilt: Path, tmp_path: Path) -> None:
    config = recipe(spoilt, workers=1)
    train(config, tmp_path / "unbroken")
    train(config, begun(config, tmp_path / "run"))
    assert not different(content(tmp_path / "run"), content(tmp_path / "unbroken"))


@pytest.mark.parametrize("split", ["train", "test"])
def test_too_many_bad_images_stop_the_run(classify: Classify, data: Path, tmp_path: Path, split: str) -> None:
    folder = Path(shutil.copytree(data, tmp_path / "spoilt"))
    for path in sorted((folder / split).rglob("*.png"))[:2]:
        path.write_bytes(b"no picture")
    code, out, err = classify("--max-unreadable", "0.1", data=folder)
    assert (code, out) == (2, "")
    message = told(err)
    assert f"spoilt/{split}/cat/" in message
    assert "(2 of 18 images cannot be read, at most 10.00% may be). Repair them or raise --max-unreadable." in message


def test_clock_changes_do_not_affect_resume(copied: Path, data: Path, unbroken: dict[str, Any]) -> None:
    for time, place in enumerate(reversed(states(copied))):
        os.utime(place, (1000 + time, 1000 + time))
        os.utime(place / "state.json", (1000 + time, 1000 + time))
    with before_step(3, lambda: pytest.fail("went back to step 2")):
        train(recipe(data, ema=0.9), copied)
    assert not different(content(copied), unbroken)


def test_run_folder_is_locked_by_one_run(classify: Classify, data: Path, tmp_path: Path) -> None:
    config = recipe(data, ema=0.9, workers=2, epochs=2000.0)
    child = fork(lambda: train(config, tmp_path / "run").stopped, tmp_path / "log")
    try:
        assert wait_for(lambda: bool(states(tmp_path / "run")), 240), (tmp_path / "log").read_text()
        code, _, err = classify(workers=2, epochs=2000.0)
        assert code == 2
        assert "run: another process is training here; wait for it, or choose another folder (-o/--output)" in told(err)
    finally:
        kill(child)
        ended(child, tmp_path / "log")
    code, _, err = classify()  # its workers may survive, but must not hold the lock
    assert code == 2
    assert "was started with other settings: epochs 2000.0 -> 2.5" in told(err)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_is_named_and_nothing_hangs(data: Path, tmp_path: Path, victim: int) -> None:
    file, place = written(recipe(data, workers=2, epochs=3000.0), tmp_path / "recipe.toml"), tmp_path / "run"
    log = tmp_path / "log"

    child = fork(lambda: command("--config", file, "-o", place), log)
    try:
        assert wait_for(lambda: bool(states(place)) and len(children(child)) >= 2, 240), log.read_text()
        kill(sorted(children(child))[victim])
        assert wait_for(lambda: not Path(f"/proc/{child}").exists() or _is_dead(child), 240), "hangs"
    finally:
        with contextlib.suppress(ProcessLookupError):
            kill(child)
        status = ended(child, log)
    assert status.code == 5, status.text
    # PyTorch names the worker, unless its broken pipe or closed socket is noticed first, or its signal is lost
    assert re.search(
        r"a data loader worker died or hangs \((DataLoader (worker|timed out)|\[Errno \d+\]|EOFError)", told(status.text)
    )
    assert states(place)


def test_worker_death_reported_at_shutdown_is_a_one_line_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the case that the broken pipe is noticed first and PyTorch's signal arrives while files are closed."""

    @contextlib.contextmanager
    def asked() -> Iterator[Callable[[], int | None]]:
        try:
            yield lambda: None
        finally:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    def broken(*_: object) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr("visattn.training.loop.asked_to_stop", asked)
    monkeypatch.setattr("visattn.training.loop._Run.go", broken)
    with pytest.raises(ResourceError, match=r"a data loader worker died or hangs \(DataLoader worker \(pid 7\)"):
        train(recipe(data), tmp_path / "run")


def _is_dead(process: int) -> bool:
    """Check whether a process is a zombie."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
