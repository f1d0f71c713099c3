"""Images of a batch get what each gets alone, also from models that mix them, draw, or take one image only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.capturing.test_odd_models import Pruned
from tests.samples import sampled
from visattn import explain, explain_batch, study
from visattn.core.pipeline import running
from visattn.core.pipeline.passes import one_pass
from visattn.core.pipeline.targets import Target
from visattn.errors import OptionError, ResourceError, ShapeError, VisattnNote

random = np.random.default_rng(0)
PHOTOS = [Image.fromarray(random.integers(0, 256, (48, 72, 3), dtype=np.uint8)) for _ in range(4)]
WHOLE: dict[str, Any] = {"resize": "fit", "img_size": (32, 48)}


class Counted(nn.Module):
    """A vision transformer that notes how many images each of its forward passes takes."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = tiny.vit()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        found: Tensor = self.vit(self.changed(x))
        return found

    def changed(self, x: Tensor) -> Tensor:
        return x


class ByBatch(Counted):
    """Normalizes by the mean of all images of the batch."""

    def changed(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, None, None, training=True)


class Drawing(Counted):
    """Hides random pixels, in evaluation mode too."""

    def changed(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.5)


class OneOnly(Counted):
    """Takes a batch of one image."""

    def changed(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            raise ValueError("one image, please")
        return x


class InCrops(nn.Module):
    """Encodes the halves of all images as one batch first, and then the images."""

    def __init__(self) -> None:
        super().__init__()
        self.halves, self.whole = tiny.vit(seed=1, img_size=(32, 16), num_classes=0), tiny.vit(num_classes=0)

    def forward(self, x: Tensor) -> Tensor:
        halves = self.halves(torch.cat([x[..., :16], x[..., 32:]]))
        return torch.cat([self.whole(x), *halves.chunk(2)], 1)


def same(model: nn.Module, **options: Any) -> None:
    """Check that a batch gives what each photo gives alone."""
    together = list(explain_batch(model, PHOTOS, batch_size=len(PHOTOS), **options))
    for one, photo in zip(together, PHOTOS, strict=True):
        alone = explain(model, photo, **options)
        largest = float(alone.map.values.nan_to_num().abs().max())
        assert torch.allclose(one.map.values, alone.map.values, rtol=0, atol=1e-5 * largest, equal_nan=True)
        assert one.map.layout == alone.map.layout
        assert [text.partition(" = ")[0] for text in one.provenance.target] == [
            text.partition(" = ")[0] for text in alone.provenance.target
        ]
    assert len({one.map.values.numpy().tobytes() for one in together}) == len(PHOTOS)  # no photo got the map of another


def test_one_pass_is_enough_once_it_is_proven() -> None:
    model = Counted()
    list(explain_batch(model, [*PHOTOS, *PHOTOS], batch_size=4, method="rollout", **WHOLE))
    assert model.sizes == [4, 1, 4]
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    list(explain_batch(model, PHOTOS, method="rollout", **WHOLE))
    assert model.sizes == [4, 1, 4, 4, 1]  # other weights, another proof


def test_models_that_mix_images_are_tried_once() -> None:
    model = ByBatch()
    list(explain_batch(model, [*PHOTOS, *PHOTOS], batch_size=4, method="rollout", **WHOLE))
    assert model.sizes == [4, 1, *[1] * 8]


@pytest.mark.parametrize("build", [ByBatch, Drawing, OneOnly])
@pytest.mark.parametrize("method", ["rollout", "attention", "pca", "gradcam"])
def test_models_that_do_not_keep_images_apart_explain_each_alone(build: Callable[[], nn.Module], method: str) -> None:
    same(build(), method=method, **({"target": 1} if method == "gradcam" else {}), **WHOLE)


@pytest.mark.parametrize(
    "options",
    [{"method": "attention", "query": "patch:0,1"}, {"method": "gradcam", "target": lambda out: out[:, 0]}],
    ids=["attention", "gradcam"],
)
def test_parts_that_are_encoded_as_more_images_are_not_taken_for_images(options: dict[str, Any]) -> None:
    same(InCrops(), **options, **WHOLE)


def test_statistics_of_a_model_that_mixes_images_are_those_of_each() -> None:
    model = ByBatch()
    prepared = [visattn.prepare(photo, model, **WHOLE) for photo in PHOTOS]
    for one, photo in zip(running.looked(model, prepared), prepared, strict=True):
        (alone,) = running.looked(model, [photo])
        assert all(torch.equal(a.operator.dense(), b.operator.dense()) for a, b in zip(one, alone, strict=True))


@pytest.mark.parametrize("build", [ByBatch, OneOnly])
@pytest.mark.parametrize("method", ["scorecam", "ablationcam"])
def test_edited_images_are_scored_each_as_alone(build: Callable[[], Counted], method: str) -> None:
    model, options = build(), {"method": method, "target": 1, **WHOLE}
    together, alone = (explain(model, PHOTOS[0], batch_size=size, **options).map.values for size in (8, 1))
    assert torch.allclose(together, alone, rtol=0, atol=1e-5 * float(alone.abs().max()))
    assert max(model.sizes) == 2  # tried with a pair, then one by one


def test_random_numbers_of_a_model_follow_the_seed_and_those_of_the_caller_are_left() -> None:
    model, options = Drawing(), {"method": "rollout", **WHOLE}
    before = torch.get_rng_state()
    one, again, other = (explain(model, PHOTOS[0], seed=seed, **options).map.values for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", sampled(["attention_gradient", "attention", "gradcam"], 3))
def test_tokens_that_each_image_drops_on_its_own_leave_the_layer_the_same(method: str) -> None:
    model = Pruned().eval()
    try:
        explain(model, PHOTOS[0], method=method, target=0)
    except OptionError as error:
        with pytest.raises(OptionError, match=str(error)[:30]):
            list(explain_batch(model, PHOTOS, method=method, target=0))
        return
    same(model, method=method, **({} if method == "attention" else {"target": 0}))


def test_scores_of_one_number_are_those_of_each_image() -> None:
    model = tiny.vit()
    same(model, method="gradcam", target=lambda out: out[0, 3])
    same(model, method="gradcam", target=lambda out: out[:, 3].mean())


def test_a_score_that_mixes_images_is_refused() -> None:
    model = tiny.vit()
    prepared = visattn.prepare_batch(PHOTOS, model)
    with pytest.raises(ShapeError, match=r"target must return one number per image, so 4 numbers, not \(\)"):
        one_pass(model, prepared, target=Target(lambda out: out.mean()))


class Dense(nn.Module):
    """A small network for segmentation."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.one, self.two = nn.Conv2d(3, 8, 3, padding=1, stride=4), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.two(self.one(x).relu())
        return found


@pytest.mark.parametrize("target", ["mask:1", " mask : 1", "pixel :40,20"])
def test_places_are_those_of_each_photo_however_they_are_spelled(target: str) -> None:
    same(Dense().eval(), method="gradcam", target=target, layer="one", **WHOLE)


def test_a_list_of_targets_has_one_for_each_image() -> None:
    model = tiny.vit()
    with pytest.raises(OptionError, match=r"got 2 targets for 4 images"):
        list(explain_batch(model, PHOTOS, method="gradcam", target=[1, 2]))
    with pytest.raises(OptionError, match=r"must be one, got 2\."):
        explain(model, PHOTOS[0], method="gradcam", target=[1, 2])
    one, same_one = (explain(model, PHOTOS[0], method="gradcam", target=target).map.values for target in (2, [2]))
    assert torch.equal(one, same_one)


def test_every_map_of_a_compiled_model_says_that_it_ran_without_that() -> None:
    compiled: Any = torch.compile(tiny.vit(), backend="eager")
    note = "the model is compiled, and ran without that"
    explained = [explain(compiled, PHOTOS[0], method="rollout"), *explain_batch(compiled, PHOTOS[:2], method="rollout")]
    (view,) = study(compiled, PHOTOS[0], methods=["rollout"])
    for made in (*(one.provenance for one in explained), view.provenance, view.maps["rollout"].provenance):
        assert made.notes.count(note) == 1


class _Greedy(torch.autograd.Function):
    """Needs more memory than there is, in the backward pass of several images."""

    most = 2

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *slopes: Tensor) -> Tensor:
        if len(slopes[0]) > _Greedy.most:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return slopes[0]


class GreedyBackward(Counted):
    """Runs out of memory in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Greedy.apply(super().forward(x))
        return found


def test_memory_that_the_backward_pass_lacks_halves_the_batch() -> None:
    with pytest.warns(VisattnNote, match="out of memory for 4 images together; they run in halves"):
        same(GreedyBackward(), method="gradcam", target=1, **WHOLE)


def test_memory_that_the_backward_pass_of_one_image_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Greedy, "most", 0)
    with pytest.raises(ResourceError, match=r"out of memory for pixels \(1, 3, 32, 48\); choose a smaller img_size"):
        explain(GreedyBackward(), PHOTOS[0], method="gradcam", target=1, **WHOLE)
