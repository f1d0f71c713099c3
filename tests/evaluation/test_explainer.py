"""A method as a function of pixels: the same map as `explain` gives, always of the class and layer of the photo itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import visattn
from visattn.errors import OptionError
from visattn.evaluation import Explainer, cascading_randomization, max_sensitivity, robustness

METHODS = "relevance", "attention", "gradcam", "eigencam", "captum.saliency", "auto"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return visattn.load_model("scenes_vit")


@pytest.mark.parametrize("method", METHODS)
def test_the_photo_itself_has_the_map_of_explain(method: str, model: nn.Module) -> None:
    explain = Explainer(model, "scene:7", method)
    expected = visattn.explain(model, "scene:7", method=method).panel
    assert torch.equal(explain(explain.pixels).values, expected.values)
    assert torch.equal(explain.explanation.panel.values, expected.values)


@pytest.mark.parametrize("method", ["relevance", "gradcam", "captum.saliency"])
def test_other_pixels_are_explained_for_the_class_and_the_layer_of_the_photo(method: str, model: nn.Module) -> None:
    explain = Explainer(model, "scene:7", method)
    score = explain.explanation.provenance.scores[0]["class"]
    other = visattn.prepare("scene:3", model)
    assert int(model(other.pixels).argmax()) != score  # so the class is not the one that is predicted for these pixels
    fixed: dict[str, Any] = {} if method != "gradcam" else {"layer": explain.explanation.map.facts.layer}
    expected = visattn.explain(model, "scene:3", method=method, target=score, **fixed).panel
    assert torch.equal(explain(other.pixels).values, expected.values)


def test_it_goes_into_the_checks_of_maps(model: nn.Module) -> None:
    explain = Explainer(model, "scene:7", "captum.saliency")
    cascade = cascading_randomization(model, explain.pixels, explain.of)
    assert abs(cascade.last) < 0.5
    assert robustness(explain, explain.pixels, samples=2).brightness.shape == (2,)
    assert max_sensitivity(explain, explain.pixels, samples=2) > 0
    assert max_sensitivity(lambda _pixels: np.eye(4), explain.pixels, samples=2) == 0


def test_wrong_words_are_those_of_explain(model: nn.Module) -> None:
    with pytest.raises(OptionError, match="relevance"):
        Explainer(model, "scene:7", "relevence")
