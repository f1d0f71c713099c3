"""Sources of size, mean and standard deviation of a model's input: known, or reported as assumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import visattn
from visattn.cli import main
from visattn.core.families import input_spec

SOURCES = tuple[str, str, str]
OWN, ASSUMED = ("model", "model", "model"), ("assumed", "assumed", "assumed")


class Plain(nn.Module):
    """Model that belongs to no known library."""

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 16, 16)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)
        for name, value in facts.items():
            setattr(self, name, value)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(pixels).flatten(2).transpose(1, 2)
        out: torch.Tensor = self.head(self.attention(tokens, tokens, tokens)[0].mean(1))
        return out


CONFIG = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.2), "interpolation": "bilinear"}


def cases() -> dict[str, tuple[nn.Module, SOURCES]]:
    visual = nn.Module()
    visual.preprocess_cfg = CONFIG  # type: ignore[assignment]
    bare = VisionTransformer(img_size=32, patch_size=16, embed_dim=8, depth=1, num_heads=2)
    return {
        "of timm, with random weights": (timm.create_model("vit_tiny_patch16_224"), ("model", "assumed", "assumed")),
        "of timm, with weights of a package": (visattn.load_model("vit_small_patch14_dinov2"), OWN),
        "timm's class, built by hand": (bare, ("model", "assumed", "assumed")),
        "of torchvision, built by hand": (torchvision.models.resnet18(), ASSUMED),
        "of visattn": (visattn.load_model("models/scenes_vit"), OWN),
        "of nobody": (Plain(), ASSUMED),
        "with its size": (Plain(img_size=32), ("model", "assumed", "assumed")),
        "with a configuration": (Plain(image_size=(32, 48), preprocess_cfg=CONFIG), OWN),
        "with open_clip's": (Plain(visual=visual), ("assumed", "model", "model")),
    }


@pytest.mark.parametrize("name", cases())
def test_source_of_each_value_is_stated(name: str) -> None:
    model, sources = cases()[name]
    spec = input_spec(model)
    assert tuple(spec.sources[key] for key in ("size", "mean", "std")) == sources
    if sources[1] == "assumed" and "timm" not in name:
        assert spec.mean == (0.485, 0.456, 0.406)


def test_preprocessing_of_published_weights_is_not_that_of_random_ones() -> None:
    model = visattn.load_model("tv:resnet18", weights="none")
    assert set(input_spec(model).sources.values()) == {"assumed"}


def test_requested_size_has_the_source_given() -> None:
    assert dict(input_spec(Plain(), 64).sources) == {"size": "given", "mean": "assumed", "std": "assumed"}


def test_stated_values_are_used() -> None:
    spec = input_spec(Plain(preprocess_cfg=CONFIG))
    assert (spec.mean, spec.std, spec.interpolation) == ((0.5, 0.4, 0.3), (0.2, 0.2, 0.2), "bilinear")


def test_explanation_states_assumed_values() -> None:
    photo = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    facts = visattn.explain(Plain(img_size=32), photo, method="attention", query="mean").provenance
    assert facts.preprocessing["size"] == {"value": [32, 32], "source": "model"}
    assert facts.preprocessing["mean"] == {"value": [0.485, 0.456, 0.406], "source": "assumed"}
    assert facts.warnings == (
        "the model does not state its preprocessing; assumed: mean 0.485, 0.456, 0.406; std 0.229, 0.224, 0.225",
    )


def test_size_of_an_uncropped_photo_is_the_input_size() -> None:
    model = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True)
    found = visattn.explain(model, Image.new("RGB", (400, 100)), method="attention", resize="fit")
    assert found.provenance.preprocessing["size"] == {"value": list(found.geometry.input), "source": "model"}
    assert found.provenance.warnings == (
        "how images were preprocessed for these weights is not known; assumed: mean 0.5, 0.5, 0.5; std 0.5, 0.5, 0.5",
    )


def test_command_line_states_assumed_values(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text("from tests.pipeline.test_preprocessing import Plain\n\ndef make():\n    return Plain()\n")
    Image.new("RGB", (50, 40), "teal").save(tmp_path / "p.png")
    options = [
        "--model",
        f"{tmp_path}/own.py:make",
        "--method",
        "attention",
        "--query",
        "mean",
        "-o",
        f"{tmp_path}/o.png",
        "--json",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["overlay", str(tmp_path / "p.png"), *options])
    assert ended.value.code == 0
    out, err = capfd.readouterr()
    assert "visattn:   input: size 224 x 224 (assumed); mean 0.485, 0.456, 0.406 (assumed); std" in err
    assert "visattn: warning: p.png: the model does not state its preprocessing; assumed: size 224 x 224; mean" in err
    preprocessing = json.loads(out)[0]["provenance"]["preprocessing"]
    assert {fact["source"] for fact in preprocessing.values()} == {"assumed"}
