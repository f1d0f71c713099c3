"""LeGrad, Grad-CAM, norm-based attention, similarity and PCA on classes of transformers, without a line written for any of them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import visattn
from tests.samples import sampled

METHODS = "legrad", "gradcam", "norm_attention", "similarity", "pca"
QUICK = "DeiTForImageClassificationWithTeacher", "Dinov2WithRegistersForImageClassification"
FULL = [
    "Aimv2VisionModel",
    "BeitForImageClassification",
    "BeitModel",
    "CLIPForImageClassification",
    "CLIPVisionModel",
    "Data2VecVisionForImageClassification",
    "Data2VecVisionModel",
    "DeiTForImageClassification",
    "DeiTModel",
    "Dinov2ForImageClassification",
    "Dinov2Model",
    "Dinov2WithRegistersModel",
    "DINOv3ViTModel",
    "IJepaForImageClassification",
    "IJepaModel",
    "MetaClip2ForImageClassification",
    "MLCDVisionModel",
    "PixioModel",
    "SiglipForImageClassification",
    "SiglipVisionModel",
    "Tipsv2VisionModel",
    "ViTForImageClassification",
    "ViTModel",
    "ViTMSNForImageClassification",
    "ViTMSNModel",
    "VitDetModel",
]


def first_number(output: Any) -> Tensor:
    """Return one number per image: a logit, or the first feature of an output."""
    values = next(output[name] for name in ("logits", "pooler_output", "last_hidden_state") if output.get(name) is not None)
    return values.flatten(1)[:, 1]  # type: ignore[no-any-return]


def maps(name: str) -> dict[str, Tensor]:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model, inputs = import_module("libraries.transformers_models").build(name)
    with torch.no_grad():
        for parameter in model.parameters():  # some start as zeros
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    pixels, found = inputs["pixel_values"][:1], {}
    with torch.no_grad(), visattn.capture(model) as recording:
        model(pixels)
    grid = next(record.keys.grid for record in recording if record.keys.grid)
    for method in METHODS:
        options: dict[str, Any] = {"target": first_number} if method in ("legrad", "gradcam") else {}
        options |= {"query": "patch:1,2"} if method in ("similarity", "norm_attention") else {}
        values = visattn.explain(model, pixels=pixels, mean=[0.5], std=[0.1], method=method, **options).map.values
        assert values.shape[-2:] == grid, method
        assert bool(values.isfinite().all()), method
        found[method] = values
    return found


def check(name: str) -> None:
    for method, values in maps(name).items():
        assert float(values.std()) > 0 or (method in ("legrad", "gradcam") and float(values.max()) >= 0), method


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))


@pytest.mark.parametrize("name", QUICK)
def test_methods_give_maps(name: str) -> None:
    check(name)


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(FULL, 3))
def test_methods_give_maps_of_more_classes(name: str) -> None:
    check(name)
