"""Targets that `visattn inspect` lists: those of the model at hand, and each of them runs as it stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
import transformers
from PIL import Image
from torch import nn

import visattn
from tests import tiny
from tests.cli.test_commands import Run, run
from visattn.core.pipeline.target_choices import choices_of

__all__ = ["run"]

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)).resize((96, 64), Image.Resampling.BICUBIC)
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


class Alive(nn.Module):
    """Convolutions of positive weights, so that no gradient vanishes, and layers behind them."""

    def __init__(self, *behind: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Sigmoid(), nn.Conv2d(8, 8, 3, 2, 1), nn.Sigmoid())
        self.behind = nn.Sequential(*behind)

    def forward(self, x: torch.Tensor) -> Any:
        return self.behind(self.features(x))


def pooled(outputs: int) -> nn.Module:
    return Alive(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, outputs))


def detector() -> nn.Module:
    model: nn.Module = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3, score_thresh=0.0, detections_per_img=5
    )
    return model


def of_labels() -> nn.Module:
    settings: Any = {"image_size": 32, "patch_size": 8, "num_labels": 4, "problem_type": "multi_label_classification", **SMALL}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**settings))


def of_queries() -> nn.Module:
    settings: Any = {"image_size": [64, 64], "patch_size": 16, "num_detection_tokens": 5, "num_labels": 3, **SMALL}
    return transformers.YolosForObjectDetection(transformers.YolosConfig(**settings))


OPEN = ["class:0", "label:0", "label:0,1", "output:0", "output:-0", "similar:photo:coffee"]
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a classifier, or labels": (lambda: pooled(4), OPEN),
    "one number": (lambda: pooled(1), ["label:0", "output:0", "output:-0"]),
    "labels": (of_labels, ["label:0", "label:0,1", "output:0", "output:-0"]),
    "an embedding": (lambda: tiny.vit(num_classes=0), ["output:0", "output:-0", "similar:photo:coffee"]),
    "masks": (lambda: Alive(nn.Conv2d(8, 3, 1)), ["pixel:X,Y", "mask:0"]),
    "detections": (detector, ["box:0"]),
    "queries": (of_queries, ["box:0", "query:0"]),
}


RUN = {"masks": ["pixel:40,30"], "queries": ["query:0"]}  # where random weights find nothing else


@pytest.mark.parametrize("name", MODELS)
def test_the_targets_of_a_model_are_listed_and_run(name: str) -> None:
    torch.manual_seed(0)
    build, expected = MODELS[name]
    model = build().eval()
    prepared = visattn.prepare(PHOTO, model)
    with torch.no_grad():
        output = model(prepared.pixels)
        if isinstance(output, torch.Tensor) and output.ndim == 4:
            output[:, 0] = output.amax(1) + 1  # so that class 0 is predicted
    listed = [choice.target for choice in choices_of(model, prepared, output)]
    assert listed == expected
    for target in RUN.get(name, listed):
        visattn.explain(model, PHOTO, method="gradcam", target=target)


def test_the_command_lists_them(run: Run) -> None:
    code, out, _ = run("inspect", "scenes_cnn", "--json")
    assert code == 0
    targets = {row["target"]: row["score"] for row in json.loads(out)["targets"]}
    assert targets["class:0"].startswith("crescent, by index or name, one of 6 classes")
    assert not any(target.startswith(("label", "mask", "box", "text")) for target in targets)
    code, out, _ = run("inspect", "scenes_cnn")
    assert "class:0" in out
