"""Modules that run several times in a forward pass: every photo is explained, and the call that a map is of is said and can be chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from visattn.errors import OptionError

PHOTOS = [Image.fromarray(np.random.default_rng(seed).integers(0, 255, (64, 64, 3), np.uint8)) for seed in range(3)]


class Net(nn.Module):
    """CNN of a beginner, with one ReLU for all layers, also behind a layer of its head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.relu, self.head, self.out = nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Conv2d(3 if not i else 8, 8, 3, 2, 1) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.relu(layer(x))
        return self.out(self.relu(self.head(x.mean((2, 3)))))  # type: ignore[no-any-return]


class Apart(Net):
    """CNN with a ReLU for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.relus = nn.ModuleList(nn.ReLU() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, relu in zip(self.layers, self.relus, strict=False):
            x = relu(layer(x))
        return self.out(self.relus[3](self.head(x.mean((2, 3)))))  # type: ignore[no-any-return]


METHODS = "gradcam", "gradcam_plus_plus", "xgradcam", "hirescam", "layercam", "eigencam", "scorecam", "ablationcam"


@pytest.mark.parametrize("method", METHODS)
def test_each_call_has_the_map_of_a_layer_of_its_own(method: str) -> None:
    shared, apart = Net().eval(), Apart().eval()
    for photo in PHOTOS:
        for call in range(3):
            found = visattn.explain(shared, photo, method=method, layer=f"relu #{call}", img_size=64)
            own = visattn.explain(apart, photo, method=method, layer=f"relus.{call}", img_size=64)
            torch.testing.assert_close(found.map.values, own.map.values)
            assert found.map.layout == own.map.layout
            assert found.provenance.parameters["layer"] == f"relu #{call}"


@pytest.mark.parametrize("method", [*METHODS, "auto"])
def test_the_last_feature_map_is_that_of_a_call_and_not_of_the_head(method: str) -> None:
    shared, apart = Net().eval(), Apart().eval()
    for photo in PHOTOS:
        found = visattn.explain(shared, photo, method=method, img_size=64)
        own = visattn.explain(apart, photo, method=method, img_size=64)
        torch.testing.assert_close(found.map.values, own.map.values)
        assert found.provenance.parameters["layer"] == "relu #2"


def test_a_name_without_a_call_is_the_last_one_that_lies_on_the_image() -> None:
    found = visattn.explain(Net().eval(), PHOTOS[0], method="gradcam", layer="relu", img_size=64)
    assert found.provenance.parameters["layer"] == "relu #2"


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("relu #3", r"relu #3: the positions of its values \(1, 8\) on the image are not known"),
        ("relu #9", r"no features of layer relu #9 were recorded \(recorded: relu #0, relu #1, relu #2, relu #3\)"),
        ("rely #0", "Net has no layer rely. Close matches: relu"),
    ],
)
def test_a_call_that_has_no_map_is_refused(layer: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        visattn.explain(Net().eval(), PHOTOS[0], method="gradcam", layer=layer, img_size=64)


def test_stages_are_calls() -> None:
    found = visattn.explain_stages(Net().eval(), PHOTOS[0], img_size=64)
    assert [(one.map.facts.layer, one.map.layout.grid) for one in found] == [
        ("relu #0", (32, 32)),
        ("relu #1", (16, 16)),
        ("relu #2", (8, 8)),
    ]


def test_batches_and_frozen_networks_are_explained_alike() -> None:
    model: Any = Net().eval()
    one_by_one = [visattn.explain(model, photo, method="gradcam", img_size=64) for photo in PHOTOS]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    together = list(visattn.explain_batch(model, PHOTOS, method="gradcam", img_size=64))
    for found, own in zip(together, one_by_one, strict=True):
        torch.testing.assert_close(found.map.values, own.map.values)
        assert found.provenance.parameters == own.provenance.parameters


def test_features_of_a_capture_have_their_call() -> None:
    model = Net().eval()
    for gradients in (False, True):
        for _ in range(2):
            with visattn.capture(model, features=["relu", "layers.0"], gradients=gradients) as recording:
                model(torch.zeros(1, 3, 64, 64))
            assert [feature.name for feature in recording.features] == ["layers.0", *(f"relu #{call}" for call in range(4))]
            placed = [feature.layout is not None for feature in sorted(recording.features, key=lambda one: one.name)]
            assert placed == [True, True, True, True, False]
