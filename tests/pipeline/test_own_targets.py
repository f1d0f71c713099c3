"""A target of its own for each image of a batch: each answer is that of the image alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import count, repeat
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.pipeline.test_batches import facts, worst
from visattn import explain, explain_batch
from visattn.core.pipeline import own_targets, together
from visattn.errors import OptionError, ResourceError, VisattnError, VisattnNote

random = np.random.default_rng(0)
PHOTOS = [
    Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((64, 96), (70, 50), (64, 96), (32, 96))
]


def second(output: Tensor) -> Tensor:
    return output[:, 1] - output[:, 2]


class Rows(nn.Module):
    """Network whose number K is the mean of cell K of the image, so the evidence for class K is cell K."""

    def __init__(self) -> None:
        super().__init__()
        self.img_size, self.preprocess_cfg = 64, {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        self.cells = nn.AvgPool2d(32)

    def forward(self, x: Tensor) -> Tensor:
        means: Tensor = self.cells(x).mean(1).flatten(1)
        return means


@pytest.mark.parametrize(
    ("targets", "method"),
    [
        ([0, 1, 2, 3], "gradcam"),
        ([3, 3, 0, 3], "relevance"),
        ([None, 2, None, 1], "auto"),
        (["output:1", 2, second, "class:0"], "gradcam"),
        ([second, second, second, second], "relevance"),
        (["label:1,2", None, 0, "output:-1"], "auto"),
        ([0, torch.tensor(1), np.int64(2), [3]], "gradcam"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),  # the same in each process
)
def test_each_image_has_the_map_of_its_own_target(targets: list[Any], method: str) -> None:
    model = tiny.vit()
    together_ = list(explain_batch(model, PHOTOS, target=targets, method=method, batch_size=3))
    for photo, target, one in zip(PHOTOS, targets, together_, strict=True):
        alone = explain(model, photo, target=target, method=method)
        assert worst(alone, one) <= 1e-5
        assert facts(alone) == facts(one)


def test_no_image_has_the_evidence_of_another_target() -> None:
    white = np.full((64, 64, 3), 255, np.uint8)
    targets = [0, 3, 1, 2]
    made = explain_batch(Rows().eval(), [white] * 4, target=iter(targets), method="hirescam", layer="cells", batch_size=4)
    for target, one in zip(targets, made, strict=True):
        assert [int(row) * 2 + int(column) for row, column in one.map.values.nonzero()] == [target]


def test_classes_share_a_pass_and_places_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    whole = together.explained_together

    def noted(model: nn.Module, prepared: Any, question: Any) -> Any:
        seen.append(question.target.of)
        return whole(model, prepared, question)

    monkeypatch.setattr(together, "explained_together", noted)
    same = [PHOTOS[0]] * 5
    list(explain_batch(tiny.vit(), same, target=[2, "output:0", 0, None, 1], method="gradcam"))
    assert seen == [[2, 0, 1]]


def test_without_memory_for_all_the_halves_keep_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, model = together.explained_together, tiny.vit()

    def short(model: nn.Module, prepared: Any, question: Any) -> Any:
        if len(prepared) > 2:
            raise ResourceError("out of memory")
        return whole(model, prepared, question)

    monkeypatch.setattr(together, "explained_together", short)
    photos, targets = [PHOTOS[0], PHOTOS[2]] * 2, [3, 1, 0, 2]
    with pytest.warns(VisattnNote, match="halves"):
        made = list(explain_batch(model, photos, target=targets, method="gradcam"))
    for photo, target, one in zip(photos, targets, made, strict=True):
        assert worst(explain(model, photo, target=target, method="gradcam"), one) <= 1e-5


def test_methods_that_score_edited_images_take_a_target_of_each() -> None:
    model, targets = tiny.vit(), [0, 2]
    for photo, target, one in zip(
        PHOTOS, targets, explain_batch(model, PHOTOS[:2], target=targets, method="captum.saliency"), strict=False
    ):
        assert worst(explain(model, photo, target=target, method="captum.saliency"), one) <= 1e-5


def test_models_that_mix_images_keep_targets_apart() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.ReLU(), Mixing(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).eval()
    photos, targets = [PHOTOS[0], PHOTOS[2], PHOTOS[0]], [2, 0, 1]
    made = explain_batch(model, photos, target=targets, method="gradcam", img_size=64)
    for photo, target, one in zip(photos, targets, made, strict=True):
        assert worst(explain(model, photo, target=target, method="gradcam", img_size=64), one) == 0


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) / 2


@pytest.mark.parametrize(
    ("images", "targets", "words"),
    [
        (lambda: PHOTOS, [0, 1, 2], ("3 targets", "4 images")),
        (lambda: PHOTOS, [0], ("1 target", "4 images")),
        (lambda: PHOTOS, [], ("0 targets", "4 images")),
        (lambda: PHOTOS, torch.arange(5) % 2, ("5 targets", "4 images")),
        (lambda: iter(PHOTOS), [0, 1], ("2 targets", "more than 2 images")),
        (lambda: iter(PHOTOS), repeat(0), ("more than 4 targets", "4 images")),
        (lambda: PHOTOS, iter([0, 1, 2]), ("3 targets", "more than 3 images")),
        (lambda: PHOTOS, {0, 1, 2, 3}, ("in their order",)),
        (lambda: PHOTOS, {0: 1}, ("in their order",)),
        (lambda: PHOTOS, [0, 1, 99, 2], ("image 2", "0 to")),
        (lambda: PHOTOS, [0, "bix:1", 0, 0], ("image 1", "box:N")),
        (lambda: PHOTOS, [0, "output:99", 0, 0], ("image 1", "output:0")),
        (lambda: PHOTOS, [0, [1, 2], 0, 0], ("image 1", "label:A,B")),
        (lambda: PHOTOS, [0, 1.5, 0, 0], ("target",)),
        (lambda: PHOTOS, torch.tensor([0, 1.5, 0, 0]), ("image 0", "target must be")),
        (lambda: PHOTOS, 1.5, ("target must be",)),
    ],
)
def test_wrong_lists_get_one_line_that_gives_both_numbers(
    images: Callable[[], Any], targets: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(VisattnError) as caught:
        list(explain_batch(tiny.vit(), images(), target=targets, method="gradcam"))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_several_targets_of_one_image_are_refused_with_the_two_ways() -> None:
    with pytest.raises(OptionError, match=r"label:A,B.*explain_batch"):
        explain(tiny.vit(), PHOTOS[0], target=[0, 1])


def test_a_stream_without_an_end_is_read_batch_by_batch() -> None:
    drawn: list[int] = []

    def photos() -> Iterator[Image.Image]:
        for number in count():
            drawn.append(number)
            yield PHOTOS[0]

    made = explain_batch(tiny.vit(), photos(), target=(number % 4 for number in count()), method="gradcam", batch_size=2)
    told = [next(made).provenance.scores[0]["class"] for _ in range(3)]
    assert told == [0, 1, 2]
    assert len(drawn) == 4


def test_equal_targets_are_made_once_and_others_are_not_taken_for_them() -> None:
    made: list[Any] = []

    def make(of: Any) -> Any:
        made.append(of)
        return of

    once = own_targets.once_each(make)
    assert [once(of) for of in (1, np.int64(1), torch.tensor(1), "1", 1)] == [1, 1, 1, "1", 1]
    assert made == [1, "1"]
    assert once(True) is True


def test_a_study_takes_a_target_for_each_photo() -> None:
    model = tiny.vit()
    targets: list[int | str] = [2, "output:0"]
    made = visattn.study(model, PHOTOS[:2], methods=["gradcam"], target=targets)
    for view, photo, target in zip(made, PHOTOS[:2], targets, strict=True):
        alone = explain(model, photo, method="gradcam", target=target)
        assert torch.equal(view.maps["gradcam"].values, alone.map.values)
    with pytest.raises(OptionError, match="3 targets for 2 images"):
        visattn.study(model, PHOTOS[:2], methods=["gradcam"], target=[0, 1, 2])
