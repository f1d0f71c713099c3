"""Images of more than three channels, for models with as many input channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import visattn
from visattn.core.images.bands import bands_of
from visattn.core.pipeline.inputs import prepare
from visattn.errors import ImageError, OptionError, UnsupportedModel


@pytest.fixture(scope="module")
def vit() -> Any:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", in_chans=5, num_classes=3).eval()


def image(kind: str = "float64") -> Any:
    values = np.random.default_rng(0).random((240, 300, 5))
    return (values * 255).astype(np.uint8) if kind == "uint8" else values.astype(kind)


@pytest.mark.parametrize("resize", ["model", "fit"])
def test_each_channel_is_preprocessed_like_a_photo(vit: Any, resize: Any) -> None:
    """Compare with the preprocessing of photos, three channels at a time; it rounds to whole levels, this does not."""
    coarse = np.random.default_rng(2).integers(
        60, 200, (5, 6, 8), dtype=np.uint8
    )  # smooth, because whole levels do not overshoot
    values = np.stack([np.asarray(Image.fromarray(part).resize((300, 240), Image.Resampling.BICUBIC)) for part in coarse], -1)
    five = prepare(bands_of(values, 5), vit, resize=resize)
    assert five.pixels.shape == (1, 5, 224, 224)
    three = timm.create_model("vit_tiny_patch16_224", in_chans=3)
    for channels in ((0, 1, 2), (2, 3, 4)):
        photo = prepare(Image.fromarray(np.ascontiguousarray(values[..., channels])), three, resize=resize)
        assert photo.geometries == five.geometries
        assert torch.allclose(photo.pixels[0], five.pixels[0, list(channels)], atol=2.5 / 255 / 0.5)


def test_mean_and_deviation_of_more_channels_are_assumed(vit: Any) -> None:
    found = prepare(bands_of(image(), 5), vit)
    assert {name: fact["source"] for name, fact in found.preprocessing.items()} == {
        "size": "model",
        "mean": "assumed",
        "std": "assumed",
    }
    assert found.warnings


@pytest.mark.parametrize("kind", ["uint8", "float32", "float64"])
@pytest.mark.parametrize("first", [False, True], ids=["channels last", "channels first"])
def test_array_of_any_dtype_and_layout_is_accepted(vit: Any, kind: str, first: bool) -> None:
    values = image(kind)
    given = torch.from_numpy(values.transpose(2, 0, 1).copy()) if first else values
    expected = prepare(bands_of(image(), 5), vit).pixels
    assert torch.allclose(prepare(bands_of(given, 5), vit).pixels, expected, atol=2.5 / 255 / 0.5)


def test_map_is_drawn_on_the_requested_rgb_channels(vit: Any) -> None:
    values = image()
    found = visattn.explain(vit, values, method="rollout", rgb=(4, 2, 0))
    assert np.array_equal(np.asarray(found.photo), (values[..., [4, 2, 0]] * 255).astype(np.float32).round().astype(np.uint8))
    assert found.overlay(opacity=0).tobytes() == found.photo.tobytes()


@pytest.mark.full
@pytest.mark.parametrize(
    "method",
    ["auto", "attention", "gradcam", "captum.integrated_gradients", pytest.param("captum.occlusion", marks=pytest.mark.evidence)],
)
def test_methods_explain_images_of_more_channels(vit: Any, method: str) -> None:
    few: dict[str, Any] = {"steps": 8} if method == "captum.integrated_gradients" else {}
    found = visattn.explain(vit, image(), method=method, **few)
    assert found.overlay().size == (300, 240)


def test_explained_channel_is_the_one_that_matters() -> None:
    """Explain a network that uses only the fifth channel: the map is high where that channel is bright."""

    class Fifth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Conv2d(5, 2, 8, 8, bias=False)
            self.image_size = 64
            with torch.no_grad():
                self.features.weight.zero_()
                self.features.weight[0, 4] = 1

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.features(pixels).clamp(min=0).mean((2, 3))
            return out

    values = np.zeros((64, 64, 5))
    values[..., :4] = np.random.default_rng(1).random((64, 64, 4))
    values[40:48, 16:24, 4] = 1
    found = visattn.explain(Fifth(), values, method="gradcam", target=0, layer="features")
    assert divmod(int(found.map.values.flatten().argmax()), 8) == (5, 2)


@pytest.mark.parametrize(
    ("given", "error", "cause"),
    [
        (np.zeros((8, 9, 4)), ImageError, r"the model takes 5 channels, got \(8, 9, 4\)\. Pass an array \(H, W, 5\)"),
        (np.zeros((8, 9)), ImageError, r"the model takes 5 channels, got \(8, 9\)"),
        (np.zeros((0, 9, 5)), ImageError, r"the model takes 5 channels, got \(0, 9, 5\)"),
        (np.full((8, 9, 5), 300), ImageError, r"must lie in \[0, 255\], got 300"),
        (np.full((8, 9, 5), np.nan), ImageError, "must be finite"),
        (Image.new("RGB", (9, 8)), UnsupportedModel, "the model takes 5 channels, got an image of mode RGB"),
    ],
    ids=["four", "gray", "empty", "range", "NaN", "photo"],
)
def test_other_images_are_refused(vit: Any, given: Any, error: type[Exception], cause: str) -> None:
    with pytest.raises(error, match=cause):
        visattn.explain(vit, given)


@pytest.mark.parametrize("rgb", [(0, 1), (0, 1, 5), (-1, 0, 1), (0.0, 1, 2)], ids=str)
def test_invalid_rgb_channels_are_refused(vit: Any, rgb: Any) -> None:
    with pytest.raises(OptionError, match=r"rgb must be (three channels from 0 to 4|a list or None), got"):
        visattn.explain(vit, image(), rgb=rgb)
