"""A run that tests of trainings break."""

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
