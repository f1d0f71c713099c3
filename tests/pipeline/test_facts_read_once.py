"""Facts of a model's weights are read once for each explanation, and anew for the next."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import visattn
from visattn._support.sampled_weights import sampled_weights
from visattn.core.families import weight_facts

PHOTO = "photo:chelsea"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Note each reading of a sample of weights."""
    noted: list[None] = []

    def reading(model: nn.Module) -> dict[str, list[float]]:
        noted.append(None)
        return sampled_weights(model)

    monkeypatch.setattr(weight_facts, "sampled_weights", reading)
    return noted


@pytest.mark.parametrize("name", ["tv:resnet18", "resnet18", "vit_tiny_patch16_224"])
def test_an_explanation_reads_the_weights_once(name: str, reads: list[None]) -> None:
    model = visattn.load_model(name, weights="none")
    for _ in range(2):
        reads.clear()
        visattn.explain(model, PHOTO, method="gradcam")
        assert len(reads) == 1
    reads.clear()
    assert len(list(visattn.explain_batch(model, [PHOTO] * 3, method="gradcam"))) == 3
    assert len(reads) == 1


def test_weights_that_change_between_two_explanations_are_noticed() -> None:
    model = visattn.load_model("tv:resnet18", weights="none")
    before = visattn.explain(model, PHOTO, method="gradcam").provenance
    with torch.no_grad():
        model.get_parameter("layer4.1.conv2.weight").data.neg_()
    after = visattn.explain(model, PHOTO, method="gradcam").provenance
    assert "changed since" not in before.weights
    assert "changed since" in after.weights


def test_weights_that_change_between_two_images_of_a_stream_are_noticed() -> None:
    model = visattn.load_model("tv:resnet18", weights="none")
    explanations = visattn.explain_batch(model, [PHOTO] * 2, method="gradcam", batch_size=1)
    first = next(explanations).provenance
    with torch.no_grad():
        model.get_parameter("fc.weight").data.neg_()
    second = next(explanations).provenance
    assert "changed since" not in first.weights
    assert "changed since" in second.weights


def test_facts_that_are_stated_inside_an_explanation_hold_from_there_on() -> None:
    model = visattn.load_model("tv:resnet18", weights="none")
    with weight_facts.facts_read_once():
        assert weight_facts.facts_of(model).classes is None  # type: ignore[union-attr]
        weight_facts.state(model, classes=["a", "b"])
        assert weight_facts.facts_of(model).classes == ("a", "b")  # type: ignore[union-attr]
