"""Small vision transformers with local attention: what each block may attend to, capture, registration."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import timm
import torch

import visattn
from visattn.errors import OptionError
from visattn.models.local_vit import LocalViT

KINDS = {
    "visattn_sliding_vit": (1, 2, 3, 5),
    "visattn_predictive_vit": (6, 6, 6, 6),
}  # with the radii of the windows in each block
SLIDING, PREDICTED = KINDS


def images(count: int = 2, side: int = 64) -> torch.Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def built(name: str) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=6).eval()


@pytest.mark.parametrize("name", KINDS)
def test_each_block_attends_to_its_window(name: str) -> None:
    model, radii = built(name), KINDS[name]
    with torch.no_grad(), visattn.capture(model) as recording:
        scores = model(images())
    assert scores.shape == (2, 6)
    assert len(recording) == len(radii)
    assert recording.reads == "mean"
    for record, radius in zip(recording, radii, strict=True):
        assert (record.kind, record.keys.grid) == ("self", (16, 16))
        weights = record.operator.dense().mean(1).view(2, 16, 16, 16, 16)
        for image, (row, column) in product(range(2), ((0, 0), (7, 8), (15, 3))):
            reached = (weights[image, row, column] > 0).nonzero()
            first, last = reached.amin(0).tolist(), reached.amax(0).tolist()
            if name == SLIDING:
                assert first == [max(row - radius, 0), max(column - radius, 0)]
                assert last == [min(row + radius, 15), min(column + radius, 15)]
            else:
                assert all(0 <= end - start <= 2 * radius for start, end in zip(first, last, strict=True))
        torch.testing.assert_close(weights.sum((3, 4)), torch.ones(2, 16, 16))


def test_the_window_of_a_patch_is_drawn_where_its_weights_are() -> None:
    model = built(PREDICTED)
    with torch.no_grad(), visattn.capture(model) as recording:
        model(images())
    for layer in range(len(recording)):
        found = visattn.methods.attention(recording, layer=layer, fusion="mean", query="patch:3,9")
        assert len(found.facts.windows) == 2
        for image, (box,) in enumerate(found.facts.windows):
            top, left, bottom, right = (int(side) // 4 for side in box)
            values = found.values[image]
            assert (values[top:bottom, left:right] > 0).all()
            assert float(values[top:bottom, left:right].sum()) == pytest.approx(1, abs=1e-5)
        assert found.at(batch=1).facts.windows == found.facts.windows[1:]
    assert not visattn.methods.attention(recording, layer=0, fusion="mean", query="mean").facts.windows
    assert not visattn.methods.attention(recording, layer="all", fusion="mean", query="patch:3,9").facts.windows


@pytest.mark.parametrize("name", KINDS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = built(name).train()
    model(images()).square().mean().backward()
    for named, parameter in model.named_parameters():
        assert parameter.grad is not None, named
        assert parameter.grad.isfinite().all(), named


def test_sizes_that_the_patches_do_not_cover_are_refused() -> None:
    with pytest.raises(OptionError, match="img_size must be a multiple of 4, got 30 x 32"):
        LocalViT(img_size=(30, 32))
    assert LocalViT(img_size=(32, 48), radii=(1,)).grid == (8, 12)
