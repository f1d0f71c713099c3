"""Validation images: what is held out, the best epoch, early stops, and the same results after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import visattn
from tests.samples import sampled
from tests.training.small import begun, content, different, pictures, recipe
from visattn.data.labeled.arrays import ArrayDataset
from visattn.data.labeled.subsets import held_out
from visattn.errors import DataError, OptionError
from visattn.training import loop, train
from visattn.training.tasks.task import Measured

PLAIN = {"validation": 0.25, "epochs": 4.0}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def accuracies(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that a test fills with the accuracies that tests on validation images give, one after the other."""
    told: list[float] = []
    test = loop._Run.test

    def given(self: Any, images: Any) -> Measured:
        found = test(self, images)
        return found if images is self.tests else found._replace(right=told.pop(0) * found.total)

    monkeypatch.setattr(loop._Run, "test", given)
    return told


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_a_share_of_each_class_is_held_out() -> None:
    labels = np.repeat([0, 1, 2], [40, 10, 2])
    whole = ArrayDataset(np.arange(52, dtype=np.uint8)[:, None, None] + np.zeros((1, 4, 4), np.uint8), labels, "abc")
    stays, apart = held_out(whole, 0.25, 3)
    assert np.bincount(apart.labels).tolist() == [10, 2, 1]
    assert np.bincount(stays.labels).tolist() == [30, 8, 1]
    pixels = [[int(np.asarray(part[i][0])[0, 0]) for i in range(len(part))] for part in (stays, apart)]
    assert sorted(pixels[0] + pixels[1]) == list(range(52))
    again, other = held_out(whole, 0.25, 3)[1], held_out(whole, 0.25, 4)[1]
    assert again.fingerprint() == apart.fingerprint() != other.fingerprint()


def test_a_class_of_one_image_cannot_be_held_out() -> None:
    whole = ArrayDataset(np.zeros((3, 4, 4), np.uint8), [0, 0, 1], "ab")
    with pytest.raises(DataError, match=r"class 'b' has one training image, so none can be held out"):
        held_out(whole, 0.5, 0)


def test_test_images_are_tested_once_at_the_end(photos: Path, tmp_path: Path) -> None:
    result = train(recipe(photos, **PLAIN), tmp_path / "run")
    found = rows(tmp_path / "run")
    assert [row["epoch"] for row in found if "validation_accuracy" in row] == [1.3333, 2.2222, 3.1111, 4.0]
    tested = [row for row in found if "test_accuracy" in row]
    assert len(tested) == 1
    assert tested[0] is found[-1]
    assert (tested[0]["test_accuracy"], tested[0]["step"]) == (result.accuracy, result.steps)


@pytest.mark.parametrize(("told", "best"), [([0.25, 0.75, 0.5, 0.75], 2), ([1.0, 0.5, 0.5, 0.5], 1), ([0.1, 0.2, 0.3, 0.4], 4)])
def test_weights_of_the_best_epoch_are_kept(
    told: list[float], best: int, accuracies: list[float], photos: Path, tmp_path: Path
) -> None:
    accuracies.extend([*told, *told])
    train(recipe(photos, keep="best", **PLAIN), tmp_path / "run")
    step = [row["step"] for row in rows(tmp_path / "run") if "validation_accuracy" in row][best - 1]
    assert json.loads((tmp_path / "run" / "final" / "model.json").read_text())["steps"] == step
    kept = visattn.load_model(str(tmp_path / "run" / "final")).state_dict()
    last = recipe(photos, **PLAIN)
    interrupted = begun(last, tmp_path / "shorter", step) if best < 4 else None
    if interrupted is None:
        train(last, tmp_path / "shorter")
        state = visattn.load_model(str(tmp_path / "shorter" / "final")).state_dict()
    else:
        from safetensors.torch import load_file

        state = load_file(interrupted / "checkpoints" / f"step_{step:08d}" / "model.safetensors")
    assert all(torch.equal(kept[name], state[name]) for name in kept)


def test_a_run_stops_when_validation_does_not_improve(accuracies: list[float], photos: Path, tmp_path: Path) -> None:
    accuracies.extend([0.5, 0.75, 0.75, 0.5, 1.0])
    result = train(recipe(photos, patience=2, validation=0.25, epochs=9.0), tmp_path / "run")
    assert [row["epoch"] for row in rows(tmp_path / "run") if "validation_accuracy" in row] == [1.3333, 2.2222, 3.1111, 4.0]
    assert result.steps == 9


@pytest.mark.parametrize("changes", sampled([{"keep": "best", "patience": 2, "ema": 0.5}, {"keep": "best"}, {"patience": 1}], 3))
def test_interrupted_runs_end_with_the_same_files(changes: dict[str, Any], photos: Path, tmp_path: Path) -> None:
    config = recipe(photos, **PLAIN, **changes)
    train(config, tmp_path / "whole")
    steps = json.loads((tmp_path / "whole" / "result.json").read_text())["steps"]
    for stop in range(1, steps):
        train(config, begun(config, tmp_path / f"part{stop}", stop))
        assert different(content(tmp_path / "whole"), content(tmp_path / f"part{stop}")) == []


def test_a_run_killed_before_its_files_ends_with_the_same_files(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe(photos, keep="best", patience=1, **PLAIN)
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_results", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "part")
    train(config, tmp_path / "part")
    assert different(content(tmp_path / "whole"), content(tmp_path / "part")) == []


@pytest.mark.parametrize("name", ["keep", "patience"])
def test_settings_for_validation_need_validation_images(name: str, photos: Path) -> None:
    with pytest.raises(OptionError, match=f"^{name} needs validation images"):
        recipe(photos, **{name: "best" if name == "keep" else 3})
