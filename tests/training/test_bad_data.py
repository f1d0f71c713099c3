"""Errors for unsuitable data and settings, full disks and missing permissions, and the files that remain."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.classifying import Classify, told
from tests.training.small import (
    before_step,
    begun,
    content,
    different,
    ended,
    fork,
    forked,
    recipe,
    states,
    written,
)
from visattn.errors import ResourceError
from visattn.training import train


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
        (_empty, (), r"every class must have images \(PNG, .*\), got none for cat"),
        (_one_class, (), r"classes"),
        (_one_picture, (), r"classes|images"),
        (_strange_class, (), r"train and test must have the same classes, got .*cow"),
        (
            lambda _: None,
            ("--batch-size", "14"),
            r"a batch of 14 is more than the 13 images. Choose a smaller --batch-size",
        ),
        (
            lambda _: None,
            ("--batch-size", "4", "--accumulate", "3"),
            r"batch_size must be a multiple of processes x accumulate \(1 x 3\)",
        ),
        (
            lambda _: None,
            ("--batch-size", "6", "--accumulate", "2", "--mixup", "0.2"),
            r"micro-batch even for mixup and cutmix, got 6",
        ),
        (shutil.rmtree, (), r"no such folder"),
    ],
    ids=["empty-class", "one-class", "one-picture", "other-classes", "batch", "accumulate", "pairs", "none"],
)
def test_unusable_training_data_is_refused(
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
        (("--lr", "0.01", "--workers", "1"), "was started with other settings: lr 0.05 -> 0.01. Choose another"),
        (("--epochs", "9", "--opt", "adamw"), "was started with other settings: epochs 2.5 -> 9.0; opt sgd -> adamw."),
        (("--batch-size", "6"), "was started with other settings: batch_size 4 -> 6."),
    ],
)
def test_resume_with_another_recipe_is_refused_and_shows_the_difference(
    classify: Classify, copied: Path, options: tuple[str, ...], message: str
) -> None:
    before = (copied / "config.toml").read_bytes()
    code, _, err = classify(*options)
    assert code == 2
    assert message in told(err)
    assert (copied / "config.toml").read_bytes() == before


def test_resume_with_other_data_needs_force(classify: Classify, data: Path, copied: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(data, tmp_path / "moved"))
    path = next((moved / "train" / "cat").iterdir())
    shutil.copy(path, path.with_name("more.png"))
    code, _, err = classify(data=moved)
    assert code == 2
    assert f"was started with other settings: data {data} -> {moved}" in told(err)
    shutil.move(path.with_name("more.png"), data / "train" / "cat" / "more.png")
    try:
        code, _, err = classify()
        assert code == 2
        assert "was started with other settings: the data changed." in told(err)
        assert classify("--force")[::2] == (0, "")
    finally:
        (data / "train" / "cat" / "more.png").unlink()
    assert json.loads((copied / "result.json").read_text())["steps"] == 8


def test_checkpoint_of_another_model_is_refused_even_with_force(classify: Classify, copied: Path) -> None:
    code, _, err = classify("--force", "--widths", "4", "--widths", "8", "--widths", "8")
    assert code == 4
    assert "the checkpoint of step 4 does not fit this model (" in told(err)


@contextlib.contextmanager
def mounted(place: Path, *options: str) -> Iterator[None]:
    """Mount a file system at a path, or skip the test if this process may not."""
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting needs root: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_full_disk_stops_the_run_and_keeps_the_previous_checkpoint(data: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
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


def test_file_size_limit_stops_the_run(data: Path, copied: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
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


def test_folder_that_becomes_read_only_stops_the_run(data: Path, copied: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    place = copied / "checkpoints"
    with mounted(place, "--bind", str(place)):

        def turn() -> None:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)

        with (
            pytest.raises(ResourceError, match=r"checkpoint of step 6 could not be saved: .*read-only file system"),
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
