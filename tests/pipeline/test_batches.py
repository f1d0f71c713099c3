"""Explanations of a batch equal those of each image alone, for every method and every kind of operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import visattn
from tests import tiny, zoo
from tests.conftest import Figures
from tests.samples import sampled
from visattn import Explanation, explain, explain_batch
from visattn.core.methods import METHODS
from visattn.core.pipeline import running, together
from visattn.core.pipeline.passes import look, one_pass
from visattn.core.pipeline.targets import Target
from visattn.errors import ImageError, OptionError, ResourceError, VisattnError, VisattnNote

random = np.random.default_rng(0)
PHOTOS = [
    Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((64, 96), (70, 50), (64, 96), (32, 96))
]
MODELS: dict[str, Any] = {
    "classifier": lambda: (tiny.vit(reg_tokens=2), {}),
    "without a head": lambda: (tiny.vit(num_classes=0), {}),
    "windows": lambda: (zoo.FAMILIES["swin"].build((64, 96)), {"img_size": (64, 96)}),
    "cnn": lambda: (visattn.load_model("visattn_cbam_resnet18", weights="none"), {"img_size": 64}),
}
_SAME = 1e-5


@pytest.fixture(scope="module", params=MODELS)
def given(request: pytest.FixtureRequest) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model and the options of its preprocessing."""
    model, options = MODELS[request.param]()
    return model, options


def worst(one: Explanation, other: Explanation) -> float:
    """Return the largest difference of two maps, relative to the largest value of the first."""
    first, second = one.map.values.double(), other.map.values.double()
    assert first.shape == second.shape
    assert torch.equal(first.isnan(), second.isnan())
    return float((first - second).nan_to_num().abs().max() / first.nan_to_num().abs().max().clamp_min(1e-12))


def facts(one: Explanation) -> dict[str, Any]:
    """Return the provenance; numbers that were computed, which a batch may round otherwise, are shortened."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.3g}")
        if isinstance(value, dict):
            return {key: short(each) for key, each in value.items()}
        return tuple(map(short, value)) if isinstance(value, (list, tuple)) else value

    return {key: short(value) for key, value in one.provenance.to_dict().items()}


_SLOW = [name for name, method in METHODS.items() if "score" in method.needs]
_FAST = [name for name in METHODS if name not in _SLOW]


@pytest.mark.parametrize("method", [*_FAST, *sampled([pytest.param(name, marks=pytest.mark.full) for name in _SLOW], 4)])
def test_every_method_gives_what_it_gives_for_each_image_alone(
    method: str, given: tuple[nn.Module, dict[str, Any]], figures: Figures
) -> None:
    model, options = given
    if "query" in METHODS[method].required:
        options = options | {"query": "patch:0,1"}
    photos = PHOTOS[:2] if "score" in METHODS[method].needs else PHOTOS
    refused = None
    try:
        alone = [explain(model, photo, method=method, **options) for photo in photos]
    except VisattnError as error:
        refused = error
    if refused is not None:
        with pytest.raises(type(refused)):
            list(explain_batch(model, photos, method=method, **options))
        return
    together = list(explain_batch(model, photos, method=method, **options))
    differs = max(worst(one, other) for one, other in zip(alone, together, strict=True))
    figures(f"{method}: batch against one by one", differs, f"<= {_SAME:g}")
    assert differs <= _SAME
    for one, other in zip(alone, together, strict=True):
        assert facts(one) == facts(other)
        assert one.photo.size == other.photo.size


@pytest.mark.parametrize(
    "options",
    [
        {"method": "attention", "query": "pixel:20,10", "resize": "fit"},
        {"method": "gradcam", "target": 3, "versus": 1},
        {"method": "rollout", "sinks": "drop"},
        {"method": "auto"},
    ],
    ids=str,
)
def test_questions_are_answered_for_each_image(options: dict[str, Any]) -> None:
    model = tiny.vit()
    for one, photo in zip(explain_batch(model, PHOTOS, **options), PHOTOS, strict=True):
        other = explain(model, photo, **options)
        assert worst(other, one) <= _SAME
        assert facts(other) == facts(one)


QUICK = "eva", "beit", "swin", "hiera", "davit", "cait"
OTHERS = sampled([pytest.param(name, marks=pytest.mark.full) for name in zoo.FAMILIES if name not in QUICK], 3)


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_the_recording_of_an_image_is_that_of_the_image_alone(name: str) -> None:
    family = zoo.FAMILIES[name]
    model, size = family.build(family.sizes[0]).eval(), family.sizes[0]
    pixels = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), visattn.capture(model, values=True, features="all") as every:
        model(pixels)
    for number in range(3):
        with torch.no_grad(), visattn.capture(model, values=True, features="all") as alone:
            model(pixels[number : number + 1])
        one = every.image(number)
        assert len(one) == len(alone)
        for record, other in zip(one, alone, strict=True):
            assert record.operator.shape == other.operator.shape
            assert torch.allclose(record.operator.dense(), other.operator.dense(), atol=1e-4)
            assert (record.value is None) == (other.value is None)
            if record.value is not None and other.value is not None:
                assert torch.allclose(record.value, other.value, rtol=1e-3, atol=1e-3)
        for feature, second in zip(one.features, alone.features, strict=True):
            assert feature.value.shape == second.value.shape
            assert torch.allclose(feature.value, second.value, rtol=1e-3, atol=1e-3)


def test_gradients_of_an_image_are_those_of_the_image_alone() -> None:
    model = tiny.vit()
    joint = visattn.prepare_batch(PHOTOS[:3], model)
    every = look(model, joint, target=Target(), features="all")
    for number in range(3):
        alone = look(model, visattn.prepare(PHOTOS[number], model), target=Target(), features="all")
        one = every.image(number)
        assert one.provenance.target == alone.provenance.target
        for record, other in zip(one, alone, strict=True):
            for got, want in zip(record.operator.gradient_pieces(), other.operator.gradient_pieces(), strict=True):
                assert torch.allclose(got[2], want[2], atol=1e-5)
        for feature, second in zip(one.features, alone.features, strict=True):
            if second.gradient is not None:
                assert feature.gradient is not None
                assert torch.allclose(feature.gradient, second.gradient, atol=1e-5)


def test_images_are_read_batch_by_batch_and_may_be_without_end() -> None:
    taken = []

    def endless() -> Iterator[Image.Image]:
        while True:
            taken.append(0)
            yield PHOTOS[len(taken) % 4]

    stream = explain_batch(tiny.vit(), endless(), method="rollout", batch_size=3)
    for _ in range(4):
        next(stream)
    assert len(taken) == 6


def test_a_bad_image_is_told_when_its_batch_is_reached() -> None:
    stream = explain_batch(tiny.vit(), [*PHOTOS[:3], "missing.png"], method="rollout", batch_size=2)
    assert len([next(stream), next(stream)]) == 2
    with pytest.raises(ImageError, match=r"missing\.png"):
        next(stream)


def test_bad_arguments_are_refused_at_once() -> None:
    with pytest.raises(OptionError, match="batch_size must be a number from 1 to 65536"):
        explain_batch(tiny.vit(), PHOTOS, batch_size=0)
    with pytest.raises(OptionError, match="option of the picture"):
        explain_batch(tiny.vit(), PHOTOS, opacity=0.5)
    with pytest.raises(OptionError, match="has no parameter"):
        explain_batch(tiny.vit(), PHOTOS, method="rollout", query="cls", steps=2)
    recording = look(tiny.vit(), visattn.prepare(PHOTOS[0], tiny.vit()))
    with pytest.raises(OptionError, match=r"image must lie in \[0, 0\]"):
        recording.image(1)


def test_a_batch_that_does_not_fit_into_memory_runs_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = tiny.vit(), list[int]()
    photos = [Image.effect_noise((48, 32), 30 + number).convert("RGB") for number in range(7)]
    known = together.explained_together

    def crowded(model: Any, prepared: Any, question: Any) -> Any:
        sizes.append(len(prepared))
        if len(prepared) > 2:
            raise ResourceError("out of memory")
        return known(model, prepared, question)

    monkeypatch.setattr(together, "explained_together", crowded)
    with pytest.warns(VisattnNote) as told:
        found = list(visattn.explain_batch(model, photos, method="rollout", batch_size=7))
    assert str(told[0].message) == "out of memory for 7 images together; they run in halves"
    assert sizes == [7, 3, 2, 4, 2, 2]
    for one, photo in zip(found, photos, strict=True):
        assert torch.allclose(one.map.values, visattn.explain(model, photo, method="rollout").map.values, atol=1e-6)


def test_recordings_that_do_not_fit_into_memory_are_made_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = tiny.vit(), list[int]()
    prepared = [visattn.prepare(photo, model) for photo in PHOTOS]
    passing = one_pass

    def crowded(model: Any, some: Any, **options: Any) -> Any:
        sizes.append(len(some.photos))
        if len(some.photos) > 1:
            raise RuntimeError("CUDA out of memory")
        return passing(model, some, **options)

    monkeypatch.setattr(together, "one_pass", crowded)
    monkeypatch.setattr(running, "one_pass", crowded)
    with pytest.warns(VisattnNote, match="they run in halves"):
        found = running.looked(model, prepared)
    assert max(sizes) > 1
    for one, photo in zip(found, prepared, strict=True):
        known = look(model, photo)
        for record, other in zip(one, known, strict=True):
            assert torch.allclose(record.operator.dense(), other.operator.dense(), atol=1e-6)
