"""What can go wrong with a training, through the command line: what is said, what is kept, what it ends with.

Interrupted runs are in `test_resume.py`; states by themselves, damaged or hostile, in `test_checkpoint.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image

from tests.cli.test_commands import Run, run
from tests.training.small import (
    before_step,
    begun,
    children,
    command,
    content,
    different,
    ended,
    fork,
    forked,
    kill,
    pictures,
    recipe,
    states,
    wait_for,
    written,
)
from tests.training.test_checkpoint import Trap, cut_file, damage_file, signed
from visattn.errors import ModelError, OptionError, ResourceError, TrainingError, VisattnWarning
from visattn.loading import load_model
from visattn.training import Config, train
from visattn.training.run.folder import finished

__all__ = ["run"]

POISONED = """
import torch
from torch import nn

class Poisoned(nn.Module):
    '''Gives no number for a picture of one colour; with MODE backward, only its gradient is none.'''

    def __init__(self, classes, channels):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, classes)

    def forward(self, pixels):
        flat = (pixels.flatten(2).var(2) < 1e-6).all(1)
        x = self.first(pixels)
        if MODE == "forward":
            return self.after(x * torch.where(flat, torch.nan, 1.0)[:, None, None, None])
        nothing = self.first.weight.sum() * 0  # whose root has no slope at 0
        return self.after(x + 0 * torch.where(flat, nothing, nothing + 1).sqrt()[:, None, None, None])

    def after(self, x):
        return self.last(self.norm(x).relu().mean((2, 3)))

def small(num_classes, in_channels):
    return Poisoned(num_classes, in_channels)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the plain recipe, with an average, comes to when nobody disturbs it."""
    place = tmp_path_factory.mktemp("unbroken") / "run"
    train(recipe(data, ema=0.9), place)
    return content(place)


@pytest.fixture(scope="module")
def half(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the same recipe that broke off with two states, of steps 2 and 4."""
    return begun(recipe(data, ema=0.9), tmp_path_factory.mktemp("half") / "run")


@pytest.fixture
def copied(half: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "run"))


@pytest.fixture
def classify(run: Run, data: Path, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """The command that the half run was begun with, and more options."""

    def call(*more: object, **changes: Any) -> tuple[int, str, str]:
        file = written(recipe(changes.pop("data", data), **({"ema": 0.9} | changes)), tmp_path / "recipe.toml")
        return run("train", "classify", "-q", "--config", file, "-o", tmp_path / "run", *map(str, more))

    return call


Classify = Callable[..., tuple[int, str, str]]


def told(err: str) -> str:
    """The one line of an error."""
    assert err.startswith("visattn: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("visattn: error: ").rstrip("\n")


# a loss or a gradient that is no number


@pytest.fixture
def poisoned(data: Path, tmp_path: Path) -> Callable[..., Config]:
    """A recipe over pictures one of which, of one colour, has a loss or gradient that is no number."""
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


def test_a_loss_that_is_no_number_stops_the_run_and_names_its_pictures(
    run: Run, poisoned: Callable[..., Config], tmp_path: Path
) -> None:
    file = written(poisoned("forward"), tmp_path / "recipe.toml")
    code, out, err = run("train", "classify", "-q", "--config", file, "-o", "run")
    assert (code, out) == (4, "")
    assert "the loss is nan near step" in told(err)
    (row,) = rows(tmp_path / "run" / "nonfinite.jsonl")
    assert any(name.endswith("cat/04.png") for name in row["pictures"])
    assert len(row["numbers"]) == 4
    for place in states(tmp_path / "run"):
        assert int(place.name[5:]) < row["step"]
        assert all_finite(place)
    assert not (tmp_path / "run" / "final").exists()


def test_skipping_leaves_such_steps_out_and_batch_norms_forget_them(poisoned: Callable[..., Config], tmp_path: Path) -> None:
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


def test_skipping_ends_where_nothing_else_comes(poisoned: Callable[..., Config], data: Path, tmp_path: Path) -> None:
    config = poisoned("forward", nonfinite="skip", epochs=20.0)
    for path in (tmp_path / "flat" / "train").rglob("*.png"):
        Image.new("RGB", (20, 18), (9, 9, 9)).save(path)
    with pytest.raises(TrainingError, match="the loss is nan near step 11;"):
        train(config, tmp_path / "run")
    assert len(rows(tmp_path / "run" / "nonfinite.jsonl")) == 11


def test_weights_that_are_no_numbers_are_not_saved_though_the_loss_was_one(
    poisoned: Callable[..., Config], tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"first\.weight: must hold finite numbers, got others") as caught:
        train(poisoned("backward"), tmp_path / "run")
    assert caught.value.exit_code == 4
    assert all(all_finite(place) for place in states(tmp_path / "run"))


# damaged states


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
def test_a_damaged_last_state_is_told_and_the_result_is_the_same(
    classify: Classify, copied: Path, unbroken: dict[str, Any], file: str, spoil: Callable[[Path], object]
) -> None:
    spoil(copied / "checkpoints" / "step_00000004" / file)
    with pytest.warns(VisattnWarning, match=rf"step_00000004/{file}: .*; going on from the one before, step 2$"):
        code, _, err = classify()
    assert (code, err) == (0, "")
    assert not different(content(copied), unbroken)


def test_nothing_is_begun_anew_where_all_states_are_damaged(classify: Classify, copied: Path) -> None:
    for place in states(copied):
        damage_file(place / "model.safetensors")
    before = {
        path: path.read_bytes() for path in copied.rglob("*") if path.is_file() and path.suffix in (".jsonl", ".safetensors")
    }
    code, out, err = classify()
    assert (code, out) == (4, "")
    assert "No state of this run is whole; restore one, or start again in another folder (-o/--output)." in told(err)
    assert {path: path.read_bytes() for path in before} == before
    assert not (copied / "final").exists()


# pictures that cannot be read


@pytest.fixture
def spoilt(data: Path, tmp_path: Path) -> Path:
    """Pictures of which one to train on and one to test on cannot be read."""
    folder = Path(shutil.copytree(data, tmp_path / "spoilt"))
    (folder / "train" / "dog" / "03.png").write_bytes(b"no picture")
    (folder / "test" / "cat" / "02.png").write_bytes(b"")
    return folder


def test_bad_pictures_are_named_and_left_out(classify: Classify, spoilt: Path, tmp_path: Path) -> None:
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
    assert finished["accuracy"] * 4 == round(finished["accuracy"] * 4)  # of the four that can be read
    assert classify(data=spoilt)[0] == 1  # finished, and still not perfect


@pytest.mark.full
def test_bad_pictures_are_counted_the_same_after_a_crash(spoilt: Path, tmp_path: Path) -> None:
    config = recipe(spoilt, workers=1)
    train(config, tmp_path / "unbroken")
    train(config, begun(config, tmp_path / "run"))
    assert not different(content(tmp_path / "run"), content(tmp_path / "unbroken"))


@pytest.mark.parametrize("split", ["train", "test"])
def test_too_many_bad_pictures_stop_the_run(classify: Classify, data: Path, tmp_path: Path, split: str) -> None:
    folder = Path(shutil.copytree(data, tmp_path / "spoilt"))
    for path in sorted((folder / split).rglob("*.png"))[:2]:
        path.write_bytes(b"no picture")
    code, out, err = classify("--max-bad", "0.1", data=folder)
    assert (code, out) == (2, "")
    message = told(err)
    assert f"spoilt/{split}/cat/" in message
    assert "(2 of 18 pictures cannot be read, at most 10.00% may); mend them or raise max_bad (--max-bad)." in message


# data and recipes that do not fit


def _empty(folder: Path) -> None:
    for path in (folder / "train" / "cat").iterdir():
        path.unlink()


def _one_class(folder: Path) -> None:
    for split in ("train", "test"):
        shutil.rmtree(folder / split / "cat")


def _one_picture(folder: Path) -> None:
    _one_class(folder)
    for path in sorted((folder / "train" / "dog").iterdir())[1:]:
        path.unlink()


def _strange_class(folder: Path) -> None:
    (folder / "test" / "dog").rename(folder / "test" / "cow")


@pytest.mark.parametrize(
    ("spoil", "more", "message"),
    [
        (_empty, (), r"every class must have pictures, got none for cat"),
        (_one_class, (), r"classes"),
        (_one_picture, (), r"classes|pictures"),
        (_strange_class, (), r"train and test must have the same classes, got .*cow"),
        (
            lambda _: None,
            ("--batch-size", "14"),
            r"a batch of 14 is more than the 13 pictures; choose a smaller batch_size",
        ),
        (
            lambda _: None,
            ("--batch-size", "4", "--accumulate", "3"),
            r"batch_size must be a multiple of processes x accumulate \(1 x 3\)",
        ),
        (lambda _: None, ("--batch-size", "6", "--accumulate", "2", "--mixup", "0.2"), r"each piece even for mixup, got 6"),
        (shutil.rmtree, (), r"no such folder"),
    ],
    ids=["empty-class", "one-class", "one-picture", "other-classes", "batch", "accumulate", "pairs", "none"],
)
def test_data_that_cannot_be_learned_from_is_refused(
    classify: Classify, data: Path, tmp_path: Path, spoil: Callable[[Path], object], more: tuple[str, ...], message: str
) -> None:
    folder = Path(shutil.copytree(data, tmp_path / "other"))
    spoil(folder)
    code, out, err = classify(*more, data=folder)
    assert (code, out) == (2, "")
    assert re.search(message, told(err))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lr", "0.01", "--workers", "1"), "was begun otherwise: lr 0.05 -> 0.01. Choose another"),
        (("--epochs", "9", "--opt", "adamw"), "was begun otherwise: epochs 2.5 -> 9.0; opt sgd -> adamw."),
        (("--batch-size", "6"), "was begun otherwise: batch_size 4 -> 6."),
    ],
)
def test_another_recipe_is_shown_and_refused(classify: Classify, copied: Path, options: tuple[str, ...], message: str) -> None:
    before = (copied / "config.toml").read_bytes()
    code, _, err = classify(*options)
    assert code == 2
    assert message in told(err)
    assert (copied / "config.toml").read_bytes() == before


def test_other_data_are_refused_and_force_goes_on(classify: Classify, data: Path, copied: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(data, tmp_path / "moved"))
    path = next((moved / "train" / "cat").iterdir())
    shutil.copy(path, path.with_name("more.png"))
    code, _, err = classify(data=moved)
    assert code == 2
    assert f"was begun otherwise: data {data} -> {moved}" in told(err)
    shutil.move(path.with_name("more.png"), data / "train" / "cat" / "more.png")
    try:
        code, _, err = classify()
        assert code == 2
        assert "was begun otherwise: the data changed." in told(err)
        assert classify("--force")[::2] == (0, "")
    finally:
        (data / "train" / "cat" / "more.png").unlink()
    assert json.loads((copied / "result.json").read_text())["steps"] == 8


def test_a_state_of_another_model_is_refused_even_by_force(classify: Classify, copied: Path) -> None:
    code, _, err = classify("--force", "--widths", "4", "--widths", "8", "--widths", "8")
    assert code == 4
    assert "the state of step 4 is not of this model (" in told(err)


# no room, no permission


@contextlib.contextmanager
def mounted(place: Path, *options: str) -> Iterator[None]:
    """Something mounted at a place, where this process may."""
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting needs root: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_stops_the_run_and_leaves_the_state_before(data: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    file, place = written(recipe(data, ema=0.9), tmp_path / "recipe.toml"), tmp_path / "disk"
    place.mkdir()
    with mounted(place, "-t", "tmpfs", "-o", "size=4m", "none"):
        begun(recipe(data, ema=0.9), place / "run")
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        (place / "other").write_bytes(bytes(max(0, free - 8192)))
        full = forked("--config", file, "-o", place / "run")
        assert full.code == 5, full.text
        assert "disk full" in told(full.text) or "no space left on device" in told(full.text)
        assert [path.name for path in states(place / "run")] == ["step_00000002", "step_00000004"]
        (place / "other").unlink()
        assert forked("--config", file, "-o", place / "run").code == 0
        assert not different(content(place / "run"), unbroken)


def test_a_file_that_may_grow_no_further_stops_the_run(
    data: Path, copied: Path, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    def limited() -> int:
        try:
            with before_step(5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))):
                train(recipe(data, ema=0.9), copied)
        except ResourceError as error:
            sys.stderr.write(str(error))
            return error.exit_code
        return 0

    status = ended(fork(limited, tmp_path / "log"), tmp_path / "log")
    assert status.code == 5, status.text
    assert "file too large" in status.text
    assert [path.name for path in states(copied)] == ["step_00000002", "step_00000004"]
    assert [path.name for path in (copied / "checkpoints").iterdir() if path.name.startswith(".")] == []
    train(recipe(data, ema=0.9), copied)
    assert not different(content(copied), unbroken)


def test_a_folder_turned_read_only_stops_the_run(data: Path, copied: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    place = copied / "checkpoints"
    with mounted(place, "--bind", str(place)):

        def turn() -> None:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)

        with (
            pytest.raises(ResourceError, match=r"state of step 6 could not be saved: .*read-only file system"),
            before_step(5, turn),
        ):
            train(recipe(data, ema=0.9), copied)
    file = written(recipe(data, ema=0.9), tmp_path / "recipe.toml")
    with mounted(copied, "--bind", str(copied)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(copied)], check=True)
        again = forked("--config", file, "-o", copied)
        assert again.code == 2
        assert "cannot be written (read-only file system)" in told(again.text)
    assert [path.name for path in states(copied)] == ["step_00000002", "step_00000004"]
    train(recipe(data, ema=0.9), copied)
    assert not different(content(copied), unbroken)


# clocks and company


def test_a_clock_that_jumps_back_changes_nothing(copied: Path, data: Path, unbroken: dict[str, Any]) -> None:
    for time, place in enumerate(reversed(states(copied))):
        os.utime(place, (1000 + time, 1000 + time))
        os.utime(place / "state.json", (1000 + time, 1000 + time))
    with before_step(3, lambda: pytest.fail("went back to step 2")):
        train(recipe(data, ema=0.9), copied)
    assert not different(content(copied), unbroken)


def test_one_folder_takes_one_run(classify: Classify, data: Path, tmp_path: Path) -> None:
    config = recipe(data, ema=0.9, workers=2, epochs=2000.0)
    child = fork(lambda: train(config, tmp_path / "run").stopped, tmp_path / "log")
    try:
        assert wait_for(lambda: bool(states(tmp_path / "run")), 60), (tmp_path / "log").read_text()
        code, _, err = classify(workers=2, epochs=2000.0)
        assert code == 2
        assert "run: another process is training here; wait for it, or choose another folder (-o/--output)" in told(err)
    finally:
        kill(child)
        ended(child, tmp_path / "log")
    code, _, err = classify()  # its workers may live on: they must not hold the folder
    assert code == 2
    assert "was begun otherwise: epochs 2000.0 -> 2.5" in told(err)


# states and networks of others


@pytest.mark.parametrize(
    "change",
    [
        {"seen": "many"},
        {"seen": None},
        {"losses_of_each": 3},
        {"log": "long"},
        {"optimizer": {"tensor": "no such"}},
        {"optimizer": {"dict": [["state", 1]]}},
        {"optimizer": 7},
        {"config": 3},
        {"bad": 3},
        {"skipped": []},
        *({name: value} for name in ("seen", "skipped", "log") for value in (math.inf, math.nan, -1, True, 10**400, 1.5)),
        {"bad": "text"},
        {"bad": [1]},
        {"losses_of_each": []},
        {"losses_of_each": [[10**400]]},
        {"losses_of_each": [["1"]]},
        {"optimizer": {"dict": [["state", {"dict": [[0, {"dict": [["momentum_buffer", 7]]}]]}]]}},
    ],
    ids=lambda change: str(change)[:30],
)
def test_facts_of_other_types_are_refused(classify: Classify, copied: Path, change: dict[str, Any]) -> None:
    path = copied / "checkpoints" / "step_00000004" / "state.json"
    facts = json.loads(path.read_text())
    facts["facts"] |= change
    path.write_text(signed(facts))
    code, _, err = classify()
    assert code == 4
    assert "the state of step 4 is not of this model" in told(err)


@pytest.mark.parametrize(
    ("group", "how"),
    [
        *((group, how) for group in ("model", "ema", "random0") for how in ("gone", "shape")),
        ("optimizer", "gone"),  # torch does not compare the shapes of an optimizer's state
    ],
)
def test_other_tensors_are_refused(classify: Classify, copied: Path, group: str, how: str) -> None:
    place = copied / "checkpoints" / "step_00000004"
    file = place / f"{group}.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = sorted(tensors)[0]
    if how == "gone":
        tensors.pop(name)
    else:
        tensors[name] = torch.zeros(2, 3, 1)
    safetensors.torch.save_file(tensors, file)
    facts = json.loads((place / "state.json").read_text())
    facts["sha256"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (place / "state.json").write_text(signed(facts))
    code, _, err = classify()
    assert code == 4
    assert "the state of step 4 is not of this model" in told(err)


@pytest.mark.parametrize("group", ["optimizer", "random0"])
def test_tensors_of_other_shapes_and_values_are_refused_when_they_are_used(classify: Classify, copied: Path, group: str) -> None:
    file = copied / "checkpoints" / "step_00000004" / f"{group}.safetensors"
    tensors = safetensors.torch.load_file(file)
    for name, tensor in tensors.items():
        if group == "optimizer":
            tensors[name] = torch.zeros(2, 3, 5)
        elif name == "numpy_rest":
            tensors[name] = torch.full_like(tensor, 10**6)
    safetensors.torch.save_file(tensors, file)
    facts = json.loads((file.parent / "state.json").read_text())
    facts["sha256"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (file.parent / "state.json").write_text(signed(facts))
    code, _, err = classify()
    assert code == 4
    assert "the state of step 4 is not of this model" in told(err)


@pytest.mark.parametrize(
    "row",
    [
        "[1]",
        "7",
        '{"step": 1}',
        '{"step": "1", "epoch": 1}',
        '{"step": NaN, "epoch": 1}',
        '{"epoch": 1, "step": [1]}',
        "[" * 50_000,
    ],
)
def test_rows_of_a_log_that_are_none_are_refused(classify: Classify, copied: Path, row: str) -> None:
    log = copied / "log.jsonl"
    before = log.read_bytes()
    line = before.splitlines(keepends=True)[0]
    log.write_bytes((row + "\n").encode() + before.removeprefix(line))
    path = copied / "checkpoints" / "step_00000004" / "state.json"
    facts = json.loads(path.read_text())
    facts["facts"]["log"] += len(row) + 1 - len(line)
    path.write_text(signed(facts))
    code, _, err = classify()
    assert code == 4
    assert "log.jsonl, line 1: must be an object of numbers with step, epoch, got " in told(err)


@pytest.mark.parametrize(
    "result",
    [
        *({name: value} for name in ("accuracy", "loss", "images_per_second") for value in ("1", math.nan, 10**5, None, True)),
        *({name: value} for name in ("parameters", "steps") for value in (1.5, -1, "1")),
        *({"bad": value} for value in ("text", [1], None)),
        {"stopped": 9},
        {"more": 1},
    ],
    ids=str,
)
def test_a_result_that_cannot_be_is_none(tmp_path: Path, result: dict[str, Any]) -> None:
    whole: dict[str, Any] = {
        "accuracy": 0.5,
        "loss": 1.0,
        "images_per_second": 9.0,
        "parameters": 3,
        "steps": 2,
        "bad": [],
        "stopped": 0,
    }
    (tmp_path / "result.json").write_text(json.dumps(whole))
    assert finished(tmp_path) is not None
    if result not in ({"loss": 10**5}, {"images_per_second": 10**5}):
        (tmp_path / "result.json").write_text(json.dumps(whole | result))
        assert finished(tmp_path) is None


def test_a_pickle_is_refused_and_not_run(classify: Classify, copied: Path, tmp_path: Path) -> None:
    place = copied / "checkpoints" / "step_00000004"
    torch.save({"a": Trap(tmp_path / "trapped")}, place / "model.safetensors")
    facts = json.loads((place / "state.json").read_text())
    facts["sha256"]["model.safetensors"] = hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest()
    (place / "state.json").write_text(signed(facts))
    code, _, err = classify()
    assert code == 4
    assert "model.safetensors: is no safetensors file" in told(err)
    assert not (tmp_path / "trapped").exists()


def test_a_state_of_a_newer_version_says_which(classify: Classify, copied: Path) -> None:
    path = copied / "checkpoints" / "step_00000004" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2, "made_by": "9.9"}))
    code, _, err = classify()
    assert code == 4
    assert "made by visattn 9.9, needs >= 9.9; upgrade visattn." in told(err)


def test_a_network_of_a_newer_version_says_which(data: Path, tmp_path: Path) -> None:
    train(recipe(data, epochs=0.4), tmp_path / "run")
    path = tmp_path / "run" / "final" / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2, "made_by": "9.9"}))
    with pytest.raises(ModelError, match=r"made by visattn 9\.9, needs >= 9\.9; upgrade visattn\.") as caught:
        load_model(str(tmp_path / "run" / "final"))
    assert caught.value.exit_code == 4


def test_by_force_the_recipe_that_is_written_down_is_the_one_that_is_trained(data: Path, tmp_path: Path) -> None:
    run = begun(recipe(data), tmp_path / "run")
    changed = replace(recipe(data), weight_decay=0.3, momentum=0.1, ema=0.9)
    train(changed, run, force=True)
    facts = json.loads((states(run)[-1] / "state.json").read_text())["facts"]
    groups = dict(dict(facts["optimizer"]["dict"])["param_groups"]["list"][0]["dict"])
    assert groups["momentum"] == 0.1
    decays = {dict(group["dict"])["weight_decay"] for group in dict(facts["optimizer"]["dict"])["param_groups"]["list"]}
    assert decays == {0.0, 0.3}


def test_a_finished_run_is_never_told_another_recipe(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(recipe(data), run)
    before = (run / "config.toml").read_bytes()
    with pytest.raises(OptionError, match=r"was begun otherwise: epochs 2\.5 -> 9\.0"):
        train(replace(recipe(data), epochs=9.0), run, force=True)
    assert (run / "config.toml").read_bytes() == before


# workers


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_is_named_and_nothing_hangs(data: Path, tmp_path: Path, victim: int) -> None:
    file, place = written(recipe(data, workers=2, epochs=3000.0), tmp_path / "recipe.toml"), tmp_path / "run"
    log = tmp_path / "log"

    child = fork(lambda: command("--config", file, "-o", place), log)
    try:
        assert wait_for(lambda: bool(states(place)) and len(children(child)) >= 2, 60), log.read_text()
        kill(sorted(children(child))[victim])
        assert wait_for(lambda: not Path(f"/proc/{child}").exists() or _is_dead(child), 60), "hangs"
    finally:
        with contextlib.suppress(ProcessLookupError):
            kill(child)
        status = ended(child, log)
    assert status.code == 5, status.text
    # torch names the worker, unless its broken pipe is seen first
    assert re.search(r"a process that reads pictures died or hangs \((DataLoader worker|\[Errno 104\])", told(status.text))
    assert states(place)


def _is_dead(process: int) -> bool:
    """Whether a process has ended and waits to be asked how."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
