"""Checkpoints and networks from other people and from other trainings."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.training.classifying import Classify, told
from tests.training.small import (
    begun,
    recipe,
    states,
)
from tests.training.test_checkpoint import Trap, signed
from visattn.core.loading import load_model
from visattn.errors import ModelError, OptionError
from visattn.training import train
from visattn.training.run.folder import finished


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
def test_facts_of_wrong_types_are_refused(classify: Classify, copied: Path, change: dict[str, Any]) -> None:
    path = copied / "checkpoints" / "step_00000004" / "state.json"
    facts = json.loads(path.read_text())
    facts["facts"] |= change
    path.write_text(signed(facts))
    code, _, err = classify()
    assert code == 4
    assert "the checkpoint of step 4 does not fit this model" in told(err)


@pytest.mark.parametrize(
    ("group", "how"),
    [
        *((group, how) for group in ("model", "ema", "random0") for how in ("gone", "shape")),
        ("optimizer", "gone"),  # PyTorch does not check the shapes of optimizer states
    ],
)
def test_unexpected_tensors_are_refused(classify: Classify, copied: Path, group: str, how: str) -> None:
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
    assert "the checkpoint of step 4 does not fit this model" in told(err)


@pytest.mark.parametrize("group", ["optimizer", "random0"])
def test_tensors_of_wrong_shapes_and_values_are_refused_on_use(classify: Classify, copied: Path, group: str) -> None:
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
    assert "the checkpoint of step 4 does not fit this model" in told(err)


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
def test_invalid_log_rows_are_refused(classify: Classify, copied: Path, row: str) -> None:
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
def test_invalid_result_file_is_ignored(tmp_path: Path, result: dict[str, Any]) -> None:
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


def test_checkpoint_of_a_newer_version_names_the_version(classify: Classify, copied: Path) -> None:
    path = copied / "checkpoints" / "step_00000004" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2, "made_by": "9.9"}))
    code, _, err = classify()
    assert code == 4
    assert "made by visattn 9.9, needs >= 9.9; upgrade visattn." in told(err)


def test_network_of_a_newer_version_names_the_version(data: Path, tmp_path: Path) -> None:
    train(recipe(data, epochs=0.4), tmp_path / "run")
    path = tmp_path / "run" / "final" / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2, "made_by": "9.9"}))
    with pytest.raises(ModelError, match=r"made by visattn 9\.9, needs >= 9\.9; upgrade visattn\.") as caught:
        load_model(str(tmp_path / "run" / "final"))
    assert caught.value.exit_code == 4


def test_forced_optimizer_settings_take_effect(data: Path, tmp_path: Path) -> None:
    run = begun(recipe(data), tmp_path / "run")
    changed = replace(recipe(data), weight_decay=0.3, momentum=0.1, ema=0.9)
    train(changed, run, force=True)
    facts = json.loads((states(run)[-1] / "state.json").read_text())["facts"]
    groups = dict(dict(facts["optimizer"]["dict"])["param_groups"]["list"][0]["dict"])
    assert groups["momentum"] == 0.1
    decays = {dict(group["dict"])["weight_decay"] for group in dict(facts["optimizer"]["dict"])["param_groups"]["list"]}
    assert decays == {0.0, 0.3}


def test_finished_run_refuses_another_config_even_with_force(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(recipe(data), run)
    before = (run / "config.toml").read_bytes()
    with pytest.raises(OptionError, match=r"was started with other settings: epochs 2\.5 -> 9\.0"):
        train(replace(recipe(data), epochs=9.0), run, force=True)
    assert (run / "config.toml").read_bytes() == before
