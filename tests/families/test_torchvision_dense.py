"""Detectors and segmentation networks of torchvision by name: weights, names of classes, and the photo that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import models
from torchvision.transforms.functional import normalize, to_tensor

import visattn
from visattn import explain, load_model, prepare
from visattn.errors import OptionError

SEGMENTER, DETECTOR = "lraspp_mobilenet_v3_large", "ssdlite320_mobilenet_v3_large"
PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)).resize((90, 60), Image.Resampling.BICUBIC)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the folder in which torchvision looks for published files."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def save(folder: Path, architecture: str, **options: Any) -> Path:
    """Save random weights as the published file of an architecture."""
    torch.manual_seed(1)
    file = folder / Path(models.get_model_weights(architecture).DEFAULT.url).name
    torch.save(models.get_model(architecture, weights=None, weights_backbone=None, **options).state_dict(), file)
    return file


@pytest.mark.parametrize("architecture", [SEGMENTER, DETECTOR])
def test_random_weights_of_a_seed(architecture: str) -> None:
    one, same, other = (load_model(f"tv:{architecture}", weights="none", seed=seed).state_dict() for seed in (5, 5, 6))
    key = next(key for key in one if key.endswith("conv.weight") or key.endswith("0.weight"))
    assert torch.equal(one[key], same[key])
    assert not torch.equal(one[key], other[key])
    model = load_model(f"tv:{architecture}", weights="none")
    assert visattn.families.provenance_of(model).random
    assert visattn.families.labels(model) is None


@pytest.mark.parametrize("architecture", [SEGMENTER, DETECTOR])
def test_published_weights_bring_the_names_of_their_classes(architecture: str, cache: Path) -> None:
    file = save(cache, architecture)
    model = load_model(f"tv:{architecture}")
    entry = models.get_model_weights(architecture).DEFAULT
    assert visattn.families.labels(model) == tuple(entry.meta["categories"])
    assert visattn.families.provenance_of(model).weights == f"tv:{architecture}.{entry.name}"
    for key, tensor in torch.load(file, weights_only=True).items():
        assert torch.equal(model.state_dict()[key], tensor)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert visattn.families.labels(model) is None  # they were those of other weights


def test_the_photo_of_a_segmentation_network_is_whole_and_normalized_as_for_its_weights(cache: Path) -> None:
    save(cache, SEGMENTER)
    prepared = prepare(PHOTO, load_model(f"tv:{SEGMENTER}"))
    expected = normalize(
        to_tensor(PHOTO.resize((780, 520), Image.Resampling.BILINEAR)), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    )
    assert torch.allclose(prepared.pixels[0], expected, atol=1e-6)
    assert prepared.geometry.seen() == (0, 0, 60, 90)
    assert {fact["source"] for name, fact in prepared.preprocessing.items() if name != "size"} == {"model"}
    assert {
        fact["source"] for fact in prepare(PHOTO, models.get_model(SEGMENTER, weights_backbone=None)).preprocessing.values()
    } == {"assumed"}


def test_a_mask_by_name(cache: Path) -> None:
    save(cache, SEGMENTER)
    model = load_model(f"tv:{SEGMENTER}")
    with torch.no_grad():
        predicted = int(model(prepare(PHOTO, model).pixels)["out"][0].argmax(0).mode().values.mode().values)
    name = visattn.families.labels(model)[predicted]  # type: ignore[index]
    explanation = explain(model, PHOTO, method="gradcam", target=f"mask:{name}")
    assert explanation.provenance.target[0].startswith(f"mean logit of {name} over its pixels")


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        (SEGMENTER, {"num_classes": 4}),
        ("fasterrcnn_mobilenet_v3_large_320_fpn", {"num_classes": 3}),
        pytest.param("retinanet_resnet50_fpn", {"num_classes": 5}, marks=pytest.mark.full),
        pytest.param("fcos_resnet50_fpn", {"num_classes": 2}, marks=pytest.mark.full),
        pytest.param("fcn_resnet50", {"num_classes": 6, "aux_loss": True}, marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_may_have_other_classes(architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    file = save(tmp_path, architecture, **options)
    model = load_model(f"tv:{architecture}", weights=file)
    stored = torch.load(file, weights_only=True)
    assert model.state_dict().keys() == stored.keys()
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in stored.items())
    assert visattn.families.labels(model) is None


def test_a_size_at_loading_is_refused() -> None:
    with pytest.raises(OptionError, match=f"tv:{SEGMENTER} takes photos of any size"):
        load_model(f"tv:{SEGMENTER}", weights="none", img_size=64)
