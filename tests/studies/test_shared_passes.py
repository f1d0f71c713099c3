"""Maps of one photo that need the same pass of the model share it, and are those of a pass of their own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import timm
import torch
from torch import nn

import visattn

PHOTO = "photo:chelsea"
CAMS = ["gradcam", "gradcam_plus_plus", "xgradcam", "hirescam", "layercam"]


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = timm.create_model(name, num_classes=10).eval()
    return made


def passes_of(model: nn.Module, methods: Sequence[str], target: int) -> int:
    """Return how often a study runs the model, once all that is kept of the model is known."""
    visattn.study(model, PHOTO, methods=methods, target=target)
    ran: list[None] = []
    handle = model.register_forward_hook(lambda *_: ran.append(None))
    visattn.study(model, PHOTO, methods=methods, target=target)
    handle.remove()
    return len(ran)


def test_class_activation_maps_of_one_target_share_a_pass() -> None:
    model = model_of("resnet18")
    assert passes_of(model, CAMS, target=3) == passes_of(model, CAMS[:1], target=3)


def test_another_target_needs_a_pass_of_its_own() -> None:
    model = model_of("resnet18")
    maps = {"three": {"method": "gradcam", "target": 3}, "four": {"method": "gradcam", "target": 4}}
    together = visattn.study(model, PHOTO, methods=maps)[0].maps
    for name, target in (("three", 3), ("four", 4)):
        alone = visattn.explain(model, PHOTO, method="gradcam", target=target).map
        assert torch.equal(together[name].values, alone.values)
        assert together[name].provenance.target == alone.provenance.target


def test_relevance_and_the_importance_of_heads_share_a_pass() -> None:
    model = model_of("vit_tiny_patch16_224")
    assert passes_of(model, ["relevance", "gradcam"], target=3) == passes_of(model, ["gradcam"], target=3)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_maps_of_a_shared_pass_are_those_of_explain(name: str) -> None:
    model = model_of(name)
    maps = visattn.study(model, PHOTO, methods=CAMS)[0].maps
    for method in CAMS:
        alone = visattn.explain(model, PHOTO, method=method).map
        assert torch.equal(maps[method].values, alone.values)
        assert maps[method].provenance == alone.provenance
