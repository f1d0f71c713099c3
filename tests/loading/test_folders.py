"""Trained networks load from their folder with the same logits, classes and preprocessing; damaged folders raise an error."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import visattn
from tests.cli.test_commands import Run, run
from visattn.core.families import input_spec, trained
from visattn.core.families.trained import evaluation_transform
from visattn.core.loading import load_model, model_folders as folders
from visattn.core.loading.blueprints import Blueprint
from visattn.errors import ModelError, OptionError, UnsupportedModel, WeightsError

__all__ = ["run"]

CLASSES = ("cat", "dog", "owl")
OWN = """
from torch import nn

def small(num_classes, in_channels, width=4):
    return nn.Sequential(nn.Conv2d(in_channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
"""


def blueprint(model: str, **changes: Any) -> Blueprint:
    values: dict[str, Any] = {"channels": 3, "size": (32, 32), "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)} | changes
    return Blueprint(model, CLASSES, **values)


CASES = {
    "ours": blueprint("visattn_resnet14", attention="cbam", channels=1, mean=(0.3,), std=(0.2,), options={"widths": [4, 8, 8]}),
    "vit_c": blueprint("visattn_vit_c", options={"embed_dim": 24, "depth": 1, "num_heads": 2}),
    "timm": blueprint("resnet10t", attention="se", size=(32, 40)),
    "torchvision": blueprint("tv:resnet18"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Blueprint:
    return CASES[request.param]


def lively(model: nn.Module) -> nn.Module:
    """Return a network in which every weight and running average differs from its initial value."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in filter(torch.is_floating_point, model.state_dict().values()):
            tensor.add_(torch.rand(tensor.shape, generator=random) * 0.05)
    return model.eval()


def saved(plan: Blueprint, folder: Path) -> nn.Module:
    model = lively(plan.build())
    folders.save(model, plan, folder, {"test_accuracy": 0.5})
    return model


def test_network_loads_with_its_classes_and_preprocessing(case: Blueprint, tmp_path: Path) -> None:
    model = saved(case, tmp_path / "final")
    pixels = torch.randn(2, case.channels, *case.size)
    before = torch.get_rng_state()
    loaded = load_model(str(tmp_path / "final"))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(part.training for part in loaded.modules())
    assert torch.equal(loaded(pixels), model(pixels))
    assert trained.labels(loaded) == CLASSES
    spec = input_spec(loaded)
    assert (spec.size, spec.channels, spec.mean, spec.std) == (case.size, case.channels, case.mean, case.std)
    with pytest.raises(OptionError, match=rf"the model was trained at {case.size[1]} x {case.size[0]} pixels, got 48"):
        input_spec(loaded, 48)


def test_pixels_are_prepared_as_in_training(case: Blueprint, tmp_path: Path) -> None:
    saved(case, tmp_path / "final")
    loaded = load_model(str(tmp_path / "final"))
    levels = np.full((*case.size, 3), (51, 102, 204), dtype=np.uint8)
    path = tmp_path / "photo.png"
    Image.fromarray(levels).save(path)
    pixels = visattn.prepare(visattn.load_image(path), loaded).pixels[0]
    if case.channels == 3:
        expected = [(level / 255 - mean) / std for level, mean, std in zip((51, 102, 204), case.mean, case.std, strict=True)]
        assert pixels.mean((1, 2)).tolist() == pytest.approx(expected, abs=1e-5)
    gray = evaluation_transform(case)(Image.open(path).convert("L" if case.channels == 1 else "RGB"))
    assert torch.allclose(pixels, gray, atol=1e-5)


def test_loading_a_folder_never_runs_the_python_file_of_its_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    model = saved(blueprint("own.py:small", options={"width": 5}), tmp_path / "final")
    Path("own.py").write_text("raise SystemExit")
    with pytest.raises(
        WeightsError, match=r"final: was built by own\.py:small; loading does not run Python files\. Build it yourself"
    ):
        load_model("final")
    tensors = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("option", ["pretrained", "checkpoint_path", "weights"])
def test_options_that_download_or_read_files_are_refused(option: str) -> None:
    with pytest.raises(OptionError, match=rf"options must not load weights, got {option}"):
        blueprint("resnet10t", options={option: "x"}).build()


def test_facts_are_written_next_to_the_weights(tmp_path: Path) -> None:
    saved(CASES["ours"], tmp_path / "final")
    told = json.loads((tmp_path / "final" / "model.json").read_text())
    assert told["sha256"] == hashlib.sha256((tmp_path / "final" / "model.safetensors").read_bytes()).hexdigest()
    assert (told["classes"], told["test_accuracy"], told["attention"]) == (list(CLASSES), 0.5, "cbam")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(CASES["ours"], tmp_path / "final")
    return tmp_path / "final"


def change(folder: Path, **values: Any) -> None:
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def other_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, path)


def infinite(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor / 0 if name == "conv1.weight" else tensor for name, tensor in load_file(path).items()}, path)
    change(folder, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def fewer(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != "conv1.weight"}, path)
    change(folder, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            other_weights,
            r"model\.safetensors: is not the file that model\.json describes \(its sha256 differs\); copy the folder again",
        ),
        (infinite, r"not finite|finite"),
        (fewer, r"conv1\.weight"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors: cannot be read \(no such file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), r"model\.safetensors: empty file"),
        (lambda folder: (folder / "model.json").write_text("{"), r"model\.json: cannot be read"),
        (lambda folder: (folder / "model.json").write_bytes(b"\xff"), r"model\.json: cannot be read"),
        (lambda folder: (folder / "model.json").write_text("[]"), r"model\.json: does not describe a network of visattn"),
        (lambda folder: (folder / "model.json").write_text('{"format": 1}'), r"model\.json: is damaged \(model is missing\)"),
        (lambda folder: change(folder, format=2, made_by="9.9"), r"model\.json: made by visattn 9\.9, needs >= 9\.9; upgrade"),
    ],
)
def test_a_damaged_folder_is_refused(folder: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(folder)
    with pytest.raises(WeightsError, match=message) as caught:
        load_model(str(folder))
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "values",
    [
        {"classes": 3},
        {"classes": [1, 2, 3]},
        {"classes": []},
        {"size": "32"},
        {"size": [32]},
        {"size": [0, -1]},
        {"mean": 0.3},
        {"std": [0.1, 0.2]},
        {"std": [0.0]},
        {"channels": "1"},
        {"model": 3},
        {"model": "no_such_model"},
        {"attention": "no_such"},
        {"attention": ["cbam"]},
        {"options": [1]},
        {"options": {"num_classes": 4}},
        {"sha256": 7},
        {"size": [100_000, 100_000]},
        {"size": [16.0, 16.0]},
        {"size": [True, 16]},
        {"mean": [10**400]},
        {"mean": [float("nan")]},
        {"mean": [1e300]},
        {"std": [float("inf")]},
        {"std": [1e-300]},
        {"std": [10**400]},
        {"channels": 17},
        {"channels": True},
        {"channels": 10**400},
        {"format": True},
        {"format": 0},
        {"format": 1.0},
        {"kind": [[[]]]},
        {"options": {"widths": [20_000] * 3}},
        {"options": {"widths": [10**400]}},
        {"options": {"widths": "[" * 9}},
    ],
    ids=lambda values: str(values)[:40],
)
def test_facts_of_wrong_types_are_refused(folder: Path, values: dict[str, Any]) -> None:
    change(folder, **values)
    begun = time.monotonic()
    with pytest.raises((ModelError, OptionError)) as caught:
        load_model(str(folder))
    assert time.monotonic() - begun < 10
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_unknown_models_and_options_are_refused() -> None:
    for plan in (blueprint("visattn_resnet14", options={"wide": 3}), blueprint("no_such_model"), blueprint("tv:no_such")):
        with pytest.raises(UnsupportedModel):
            plan.build()


def test_weights_argument_with_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(OptionError, match="a folder has its own weights"):
        load_model(str(folder), weights="none")


@pytest.mark.parametrize("how", ["cnn", "vit"])
def test_overlay_and_heads_work_with_a_trained_folder(run: Run, tmp_path: Path, how: str) -> None:
    saved(CASES["vit_c"] if how == "vit" else blueprint("visattn_resnet14", attention="se"), tmp_path / "final")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(tmp_path / "photo.png")
    commands = [("overlay", ["-o", "overlay.png"])] + ([("heads", ["-o", "heads.png"])] if how == "vit" else [])
    for name, more in commands:
        method = ["--method", "gradcam"] if how == "cnn" else []
        code, _, err = run(name, "photo.png", "--model", "final", "--weights", "auto", *method, *more)
        assert code == 0, err
        assert (tmp_path / more[1]).stat().st_size > 0
    shutil.rmtree(tmp_path / "final")
