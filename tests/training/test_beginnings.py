"""Start of a training: published weights, and incompatible options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.training.small import pictures, recipe
from visattn.errors import DataError, OptionError, WeightsError
from visattn.training import train
from visattn.training.config import Config
from visattn.training.tasks.classification import Classification, begin_with, blueprint_of


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Save a checkpoint of a timm network with seven classes."""
    torch.manual_seed(5)
    state = timm.create_model("resnet10t", num_classes=7).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "published.safetensors")
    return tmp_path / "published.safetensors"


def fine_tuning(data: Path, weights: Path, **changes: object) -> Config:
    return replace(recipe(data), model="resnet10t", widths=(), img_size=32, weights=str(weights), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", ["none", "se"])
def test_published_weights_are_loaded_except_the_last_layer(tmp_path: Path, published: Path, attention: str) -> None:
    config = fine_tuning(pictures(tmp_path / "data"), published, attention=attention)
    blueprint = blueprint_of(config)
    assert (blueprint.channels, blueprint.mean) == (3, (0.485, 0.456, 0.406))
    model = blueprint.build()
    begin_with(model, config)
    torch.manual_seed(5)
    donor = timm.create_model("resnet10t", num_classes=7).state_dict()
    own = {name.replace(".base.", "."): tensor for name, tensor in model.state_dict().items()}
    taken = [name for name in donor if not name.startswith("fc.")]
    assert len(taken) > 50
    assert all(torch.equal(own[name], donor[name]) for name in taken)
    assert own["fc.weight"].shape[0] == len(blueprint.classes) != 7


def test_published_weights_of_another_architecture_are_refused(tmp_path: Path, published: Path) -> None:
    config = fine_tuning(pictures(tmp_path / "data"), published, model_kwargs={"channels": (8, 8, 8, 8)})
    with pytest.raises(WeightsError, match=r"resnet10t: \d+ layers differ from the published ones .* or pass weights='none'"):
        train(config, tmp_path / "run")


def test_half_precision_with_a_scaler_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"float16 needs a GPU, .* Choose amp='bfloat16', or none\."):
        train(replace(recipe(pictures(tmp_path / "data")), amp="float16"), tmp_path / "run")


@pytest.mark.parametrize("maps_every", [0, 2])
def test_unreadable_test_set_is_an_error(tmp_path: Path, maps_every: int) -> None:
    data = pictures(tmp_path / "data")
    for path in (data / "test").rglob("*.png"):
        Image.new("RGB", (16, 16)).save(path)
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"no test image can be read\.$"):
        train(replace(recipe(data), maps_every=maps_every, max_unreadable=1.0), tmp_path / "run")


def test_weights_of_a_run_bring_its_normalization(tmp_path: Path) -> None:
    first = replace(recipe(pictures(tmp_path / "data")), model="resnet10t", widths=(), img_size=32)
    train(first, tmp_path / "run")
    own = Classification(first).blueprint
    again = Classification(replace(first, weights=str(tmp_path / "run" / "final" / "model.safetensors"))).blueprint
    assert (again.mean, again.std) == (own.mean, own.std)
    assert own.mean != (0.485, 0.456, 0.406)
    alone = tmp_path / "model.safetensors"
    alone.write_bytes((tmp_path / "run" / "final" / "model.safetensors").read_bytes())
    assert Classification(replace(first, weights=str(alone))).blueprint.mean == (0.485, 0.456, 0.406)
