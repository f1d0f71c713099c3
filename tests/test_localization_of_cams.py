"""Class activation maps of a CNN with pretrained weights lie on the object, measured on hand-drawn masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import visattn
from tests.conftest import Figures
from visattn import data, evaluation
from visattn.core.families import labels

MODEL = "tf_efficientnet_lite0"
MASKS = Path(__file__).parents[1] / "assets" / "objects" / "masks"
PHOTOS = "coffee", "chelsea"
CATS = ["tabby", "tiger cat", "Persian cat", "Siamese cat", "Egyptian cat"]

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def classifier() -> nn.Module:
    return visattn.load_model(MODEL, weights=data.offline_weights(MODEL))


def first_classes(model: nn.Module, photo: str, count: int) -> list[str]:
    names = labels(model)
    assert names is not None
    with torch.inference_mode():
        logits = model(visattn.prepare(visattn.load_image(data.photo_path(photo)), model).pixels)[0]
    return [names[index].split(",")[0] for index in logits.topk(count).indices.tolist()]


def test_cats_are_classes_281_to_285(classifier: nn.Module) -> None:
    names = labels(classifier)
    assert names is not None
    assert [name.split(",")[0] for name in names[281:286]] == CATS


def test_coffee_is_espresso(classifier: nn.Module) -> None:
    assert first_classes(classifier, "coffee", 1) == ["espresso"]


def test_chelsea_is_a_cat(classifier: nn.Module) -> None:
    assert set(first_classes(classifier, "chelsea", 3)) & set(CATS)


@pytest.mark.parametrize("photo", PHOTOS)
def test_gradcam_lies_on_the_object_more_than_its_shifted_copies(photo: str, classifier: nn.Module, figures: Figures) -> None:
    with Image.open(MASKS / f"{photo}.png") as picture:
        mask = np.asarray(picture) > 0
    found = visattn.explain(classifier, data.photo_path(photo), method="gradcam")
    lift = float(evaluation.lift(found.map, mask, found.geometry))
    shifted = float(evaluation.lift(evaluation.shifted_copies(found.map), mask, found.geometry).mean())
    prior = float(evaluation.lift(evaluation.center_prior(found.map), mask, found.geometry))
    every = evaluation.lift(evaluation.shifted_copies(found.map, found.map.layout.cells - 1), mask, found.geometry)
    figures(f"lift on {photo}: Grad-CAM of {MODEL}", lift, "> its shifted copies")
    figures(f"lift on {photo}: 20 shifted copies of Grad-CAM, mean", shifted, "")
    figures(f"lift on {photo}: center prior for Grad-CAM", prior, "")
    figures(f"lift on {photo}: share of all 48 shifts that Grad-CAM is above", float((lift > every).mean()), ">= 0.9")
    assert lift > shifted
    assert (lift > every).mean() >= 0.9
