"""Models of open_clip by name, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import safetensors.torch
import torch

import visattn
from visattn.errors import UnsupportedModel, WeightsError

NAME = "ViT-S-32-alt"


@pytest.fixture(scope="module")
def own() -> Any:
    torch.manual_seed(0)
    return open_clip.create_model(NAME, pretrained=None, output_dict=True).eval()


def test_model_of_a_file_gives_the_same_output(own: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    safetensors.torch.save_file({name: value.contiguous() for name, value in own.state_dict().items()}, file)
    model = visattn.load_model(f"clip:{NAME}", weights=file)
    pixels = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(model(pixels)["image_features"], own(pixels)["image_features"])
    assert not model.training
    assert visattn.families.provenance_of(model).weights == "own.safetensors"


@pytest.mark.parametrize("prefix", ["module.", "clip_model."])
@pytest.mark.parametrize("nest", ["state_dict", "net"])
def test_a_checkpoint_of_a_training_loop_gives_the_same_output(own: Any, nest: str, prefix: str, tmp_path: Path) -> None:
    content = {nest: {prefix + name: value for name, value in own.state_dict().items()}, "epoch": 3, "best": np.float64(0.5)}
    torch.save(content, tmp_path / "own.pt")
    model = visattn.load_model(f"clip:{NAME}", weights=tmp_path / "own.pt")
    pixels = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(model(pixels)["image_features"], own(pixels)["image_features"])
    assert f"the prefix '{prefix}' of the checkpoint's names was removed" in visattn.families.provenance_of(model).notes


def test_preprocessing_is_that_of_the_model(own: Any) -> None:
    model = visattn.load_model(f"clip:{NAME}", weights="none")
    _, _, transform = open_clip.create_model_and_transforms(NAME, pretrained=None)
    photo = visattn.load_image("photo:chelsea")
    prepared = visattn.prepare(photo, model)
    assert prepared.preprocessing["mean"]["source"] == "model"
    assert torch.allclose(prepared.pixels[0], transform(photo), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clip:ViT-B-33.openai", r"unknown model 'clip:ViT-B-33\.openai'\. Close matches: clip:ViT-B-32"),
        ("clip:ViT-B-32", r"no weights are named for clip:ViT-B-32; available: clip:ViT-B-32\.openai"),
        ("clip:ViT-B-32.opena", r"unknown weights 'opena' for clip:ViT-B-32; available: clip:ViT-B-32\.openai"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        visattn.load_model(name)


def test_weights_of_another_architecture_are_refused(own: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    safetensors.torch.save_file({name: value.contiguous() for name, value in own.state_dict().items()}, file)
    with pytest.raises(WeightsError, match="is no checkpoint of ViT-B-32"):
        visattn.load_model("clip:ViT-B-32", weights=file)
