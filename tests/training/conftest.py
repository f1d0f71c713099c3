"""Fixtures for training tests: an uninterrupted run, and one that was interrupted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_commands import Run, run as run
from tests.training.small import (
    begun,
    content,
    pictures,
    recipe,
    written,
)
from visattn.training import train


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the content of an uninterrupted run with default settings and weight averaging."""
    place = tmp_path_factory.mktemp("unbroken") / "run"
    train(recipe(data, ema=0.9), place)
    return content(place)


@pytest.fixture(scope="module")
def half(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with the same settings that was interrupted with two checkpoints, of steps 2 and 4."""
    return begun(recipe(data, ema=0.9), tmp_path_factory.mktemp("half") / "run")


@pytest.fixture
def copied(half: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "run"))


@pytest.fixture
def classify(run: Run, data: Path, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command of the interrupted run with further options."""

    def call(*more: object, **changes: Any) -> tuple[int, str, str]:
        file = written(recipe(changes.pop("data", data), **({"ema": 0.9} | changes)), tmp_path / "recipe.toml")
        return run("train", "classify", "-q", "--config", file, "-o", tmp_path / "run", *map(str, more))

    return call
