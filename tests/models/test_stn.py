"""Classifier behind a spatial transformer: it reads the window that the transformer predicts, which is published."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import visattn
from visattn.core.loading.blueprints import Blueprint
from visattn.errors import OptionError
from visattn.models.stn import TransformedClassifier


def images() -> torch.Tensor:
    return torch.randn(2, 1, 60, 60, generator=torch.Generator().manual_seed(0))


def test_the_classifier_reads_the_window_that_the_transformer_predicts() -> None:
    torch.manual_seed(0)
    model: Any = TransformedClassifier(window_size=20).eval()
    with torch.no_grad():
        model.transformer.theta.bias.copy_(torch.tensor([1 / 3, 0, 0.2, 0, 1 / 3, -0.4]))
        positions = torch.nn.functional.affine_grid(
            torch.tensor([[[1 / 3, 0, 0.2], [0, 1 / 3, -0.4]]] * 2), [2, 1, 20, 20], align_corners=False
        )
        window = torch.nn.functional.grid_sample(images(), positions, align_corners=False)
        torch.testing.assert_close(model(images()), model.classifier(window))


def test_without_a_transformer_the_whole_image_is_classified() -> None:
    torch.manual_seed(0)
    model: Any = TransformedClassifier(transformer=False).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(images()), model.classifier(images()))


def test_the_window_is_published_and_located() -> None:
    model = TransformedClassifier().eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(images())
    (feature,) = (feature for feature in recording.features if feature.role == "transform")
    assert feature.layout is not None
    assert feature.layout.grid == (60, 60)


def test_it_is_a_reference_network_that_takes_no_other_attention() -> None:
    options = {"window_size": 20}
    blueprint = Blueprint("visattn_stn", ("a", "b", "c"), 1, (60, 60), (0.3,), (0.2,), options=options)
    model = blueprint.build().eval()
    assert model(images()).shape == (2, 3)
    with pytest.raises(
        OptionError, match=r"visattn_stn has its own attention \(a spatial transformer\) and takes no other, got se"
    ):
        Blueprint("visattn_stn", ("a", "b"), 1, (60, 60), (0.3,), (0.2,), attention="se").build()


@pytest.mark.parametrize("start", [0.25, 1.0])
def test_the_window_starts_in_the_middle(start: float) -> None:
    model: Any = TransformedClassifier(window_size=15, start=start).eval()
    corners = model.transformer.theta.bias.view(2, 3) @ torch.tensor([[-1.0, 1], [-1, 1], [1, 1]])
    torch.testing.assert_close(corners, torch.tensor([[-start, start], [-start, start]]))
    assert not model.transformer.theta.weight.any()


@pytest.mark.parametrize("start", [0.0, 1.5])
def test_a_start_out_of_range_is_refused(start: float) -> None:
    with pytest.raises(OptionError, match=r"start must lie in \(0, 1\], got"):
        TransformedClassifier(start=start)
