# mypy: disable-error-code="no-untyped-call"
"""Photos, pixels and passes: the advice of messages, followed literally."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from tests import tiny
from visattn.core import families
from visattn.core.geometry import Box
from visattn.core.operators import SoftmaxOperator
from visattn.core.pipeline import inputs
from visattn.core.pipeline.again import scoring
from visattn.core.pipeline.targets import Target
from visattn.errors import ImageError, LayoutError, ModelError, UnsupportedModel, VisattnNote

MODEL = "test_vit"
PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
pytestmark = pytest.mark.filterwarnings("ignore::visattn.errors.VisattnNote")


def test_a_dictionary_with_a_key_that_is_named_is_explained() -> None:
    with pytest.raises(ImageError, match=r"a dictionary needs one of the keys (.*), got label") as caught:
        visattn.prepare({"label": 3}, tiny.vit())
    for key in re.findall(r"keys (.*), got", str(caught.value))[0].split(", "):
        with pytest.warns(VisattnNote, match=f"the image is taken from the key '{key}'"):
            assert len(visattn.prepare({"label": 3, key: PHOTO}, tiny.vit()).pixels) == 1


def test_fit_prepares_a_photo_whatever_the_steps_of_the_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trimmed:
        def __call__(self, image: Image.Image) -> Image.Image:
            return image.crop((1, 1, image.width, image.height))

    model = timm.create_model(MODEL).eval()
    spec = families.input_spec(model)
    monkeypatch.setattr(inputs, "input_spec", lambda *_: replace(spec, transform=(Trimmed(), *spec.transform)))
    with pytest.raises(UnsupportedModel, match=r"has the unsupported step Trimmed\. Use resize='fit'"):
        visattn.prepare(PHOTO, model)
    assert visattn.prepare(PHOTO, model, resize="fit").geometry.seen() == Box(0, 0, 48, 64)


def test_a_layout_with_the_right_grid_and_prefix_is_accepted() -> None:
    operator = SoftmaxOperator(*tiny.operands(7))
    for wrong in (tiny.layout(grid=(3, 3)), tiny.layout(prefix=())):
        with pytest.raises(LayoutError, match=r"but the model used 7 and 7\. Check the grid and the prefix tokens"):
            tiny.record(operator, wrong)
    assert tiny.record(operator, tiny.layout(("cls",), (2, 3))).operator is operator


def test_pixels_of_another_size_than_the_model_takes_are_refused() -> None:
    model = tiny.vit()
    prepared = visattn.prepare(PHOTO, model)
    wrong = replace(prepared, pixels=tiny.pixels(size=(64, 96)))
    with (
        pytest.raises(UnsupportedModel, match=r"^the model takes pixels of size \(32, 48\), got \(64, 96\)\.$"),
        scoring(model, wrong, Target(0)),
    ):
        pass
    with scoring(model, prepared, Target(0)) as (_, scored):
        assert scored.pixels.shape[-2:] == (32, 48)


def test_a_copy_of_an_input_of_inference_mode_is_differentiated() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 3)

        def forward(self, x: Tensor, extra: Tensor) -> Tensor:
            return self.head((self.conv(x) * extra).mean((2, 3)))  # type: ignore[no-any-return]

    with torch.inference_mode():
        extra = torch.ones(1, 8, 1, 1)
    options: dict[str, Any] = {"method": "gradcam", "layer": "conv", "img_size": 32}
    with pytest.raises(ModelError, match=r"[^.]\. The input extra was made under .* Pass extra\.clone\(\) instead\."):
        visattn.explain(Scaled().eval(), PHOTO, inputs={"extra": extra}, **options)
    assert visattn.explain(Scaled().eval(), PHOTO, inputs={"extra": extra.clone()}, **options).map.values.isfinite().all()
