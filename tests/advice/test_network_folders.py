# mypy: disable-error-code="no-untyped-call"
"""Folders of trained networks: the advice of messages about damaged ones, followed literally."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.advice.tensors import same
from tests.loading.test_folders import blueprint, change, saved
from visattn._support.language import in_shell
from visattn.core.loading import load_model
from visattn.errors import UnsupportedModel, WeightsError

pytestmark = pytest.mark.filterwarnings("ignore::visattn.errors.VisattnNote")


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unreadable": (
        lambda folder: (folder / "model.json").write_text("{"),
        r"model\.json: cannot be read .*; pass a folder written by",
    ),
    "incomplete": (
        lambda folder: (folder / "model.json").write_text('{"format": 1}'),
        r"is damaged \(model is missing\); copy the folder again",
    ),
    "mean": (
        lambda folder: change(folder, mean=[0.5]),
        r"is damaged \(mean must have 3 numbers\); copy the folder again",
    ),
    "std": (lambda folder: change(folder, std=[0.5]), r"is damaged \(std must have 3 numbers\); copy the folder again"),
    "smaller": (
        lambda folder: change(folder, options={"widths": [4, 4, 8]}),
        r"does not fit the model: .* more of another shape\); copy the folder again",
    ),
    "options": (
        lambda folder: change(folder, options={"widths": [20_000] * 3}),
        r"far larger than its weights; copy the folder again",
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_damaged_folder_that_is_copied_again_loads(how: str, tmp_path: Path) -> None:
    spoil, message = SPOILT[how]
    model = saved(blueprint("visattn_resnet14", options={"widths": [4, 8, 8]}), tmp_path / "source")
    shutil.copytree(tmp_path / "source", tmp_path / "final")
    spoil(tmp_path / "final")
    with pytest.raises((WeightsError, UnsupportedModel), match=message):
        load_model(str(tmp_path / "final"))
    shutil.rmtree(tmp_path / "final")
    shutil.copytree(tmp_path / "source", tmp_path / "final")
    assert same(load_model(str(tmp_path / "final")), model.state_dict())


def test_a_folder_without_weights_is_told_without_an_option_that_it_does_not_take(tmp_path: Path) -> None:
    saved(blueprint("visattn_resnet14", options={"widths": [4, 8, 8]}), tmp_path / "final")
    (tmp_path / "final" / "model.safetensors").unlink()
    with (
        in_shell(),
        pytest.raises(WeightsError, match=r"model\.safetensors: cannot be read \(no such file .*\); check the file\.$"),
    ):
        load_model(str(tmp_path / "final"))


def test_the_folder_of_a_run_is_left_for_the_network_in_it(tmp_path: Path) -> None:
    model = saved(blueprint("visattn_resnet14", options={"widths": [4, 8, 8]}), tmp_path / "run" / "final")
    with pytest.raises(UnsupportedModel, match=r"is the folder of a run\. Pass the network in it, ") as caught:
        load_model(str(tmp_path / "run"))
    assert same(load_model(str(caught.value).partition("in it, ")[2].rstrip(".")), model.state_dict())
