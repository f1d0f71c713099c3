"""Boxes of detectors as targets: which there are, where they lie on the photo, and the map that each is found on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

import visattn
from visattn.errors import OptionError

LABELS = ["cat", "dog", "owl"]
LOGITS = torch.tensor([[0.0, 1, 0], [-3, -2, -4], [3, 0, 0], [0, 0, 2]])  # of four queries
CORNERS = [(8.0, 8, 40, 40), (60, 4, 90, 30)]  # left, top, right, bottom in an input of 64 x 96 pixels


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 255, (128, 192, 3), np.uint8)
    return Image.fromarray(noise)


class Queries(nn.Module):
    """Four queries with known logits; `nothing` is added as the score of no object."""

    def __init__(self, nothing: float | None = None, labels: int | None = None) -> None:
        super().__init__()
        self.stem, self.nothing = nn.Conv2d(3, 4, 8, 8), nothing
        if labels is not None:
            self.config = SimpleNamespace(num_labels=labels)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        zero = 0 * self.stem(x).mean((1, 2, 3))[:, None, None]
        logits = LOGITS if self.nothing is None else torch.cat([LOGITS, torch.full((4, 1), self.nothing)], 1)
        boxes = torch.tensor([[0.5, 0.5, 0.2, 0.4]]).expand(4, 4)
        return {"logits": logits + zero, "pred_boxes": boxes + zero}


class Listing(nn.Module):
    """Detector in the form of torchvision with two boxes."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.stem, self.count = nn.Conv2d(3, 4, 8, 8), count

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        some, scores = slice(self.count), torch.tensor([0.9, 0.6])
        return [
            {
                "boxes": torch.tensor(CORNERS)[some],
                "labels": torch.tensor([2, 0])[some],
                "scores": (scores + self.stem(one[None]).mean())[some],
            }
            for one in x
        ]


def explained(model: nn.Module, photo: Image.Image, target: str, **options: Any) -> visattn.Explanation:
    shown: dict[str, Any] = {"img_size": (64, 96), "resize": "fit", "method": "gradcam", "layer": "stem", "labels": LABELS}
    return visattn.explain(model.eval(), photo, target=target, **shown | options)


@pytest.mark.parametrize(("number", "query", "name"), [(0, 2, "cat"), (1, 3, "owl"), (2, 0, "dog")])
def test_boxes_of_queries_are_detections_above_one_half_in_order(photo: Image.Image, number: int, query: int, name: str) -> None:
    found = explained(Queries(), photo, f"box:{number}")
    chance = float(LOGITS[query].sigmoid().max())
    assert found.provenance.target[0].startswith(f"logit of {name} in box {number} (query {query}) = ")
    assert f"probability {chance:.0%}" in found.provenance.target[0]
    (detection,) = found.map.facts.detections
    assert detection.label == f"{name} {chance:.0%}"
    on_photo = found.geometry.box_to_photo(detection.box)
    assert [round(side) for side in on_photo] == [38, 77, 90, 115]  # of 128 x 192: center in the middle, 0.4 high, 0.2 wide


def test_no_object_takes_its_share_of_a_softmax(photo: Image.Image) -> None:
    shares = torch.cat([LOGITS, torch.full((4, 1), 1.0)], 1).softmax(1)[:, :3].amax(1)
    assert (shares > 0.5).tolist() == [False, False, True, True]
    with pytest.raises(
        OptionError,
        match=r"box:2: the model returned 2 boxes\. Pass box:0 to box:1\. Boxes of this photo: 0: cat \d+%, 1: owl \d+%",
    ):
        explained(Queries(1.0), photo, "box:2")


def test_without_a_detection_the_nearest_queries_are_named(photo: Image.Image) -> None:
    with pytest.raises(OptionError, match=r"above 50%.*query:2 \(cat \d+%\), query:3 \(owl"):
        explained(Queries(9.0), photo, "box:0")


def test_without_the_number_of_classes_no_probability_is_said(photo: Image.Image) -> None:
    with pytest.raises(OptionError, match=r"names of the classes are not known.*query:0'? to query:3"):
        explained(Queries(), photo, "box:0", labels=None)
    assert "probability" not in explained(Queries(), photo, "query:1", labels=None).provenance.target[0]
    assert "box 0 (query 2)" in explained(Queries(labels=3), photo, "box:0", labels=None).provenance.target[0]


def test_query_of_the_class_of_no_object_is_named_after_its_best_class(photo: Image.Image) -> None:
    assert explained(Queries(9.0), photo, "query:3").provenance.target[0].startswith("logit of owl in query 3 = ")


def test_box_of_torchvision_is_drawn_on_the_photo(photo: Image.Image) -> None:
    found = explained(Listing(), photo, "box:1")
    (detection,) = found.map.facts.detections
    assert detection.label.startswith("cat ")
    assert tuple(found.geometry.box_to_photo(detection.box)) == (8, 120, 60, 180)  # both sides of the photo are doubled
    drawn = np.asarray(found.overlay(normalize="minmax"))
    assert (drawn[20:58, 179] == 255).mean() > 0.9  # the right edge is white


@pytest.mark.parametrize(
    ("count", "target", "reason"),
    [
        (2, "box:2", r"box:0 to box:1\. Boxes of this photo: 0: owl \d+%, 1: cat \d+%"),
        (0, "box:0", "found nothing in this photo"),
    ],
)
def test_a_box_that_is_not_there_names_those_that_are(photo: Image.Image, count: int, target: str, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        explained(Listing(count), photo, target)


class Raw(nn.Module):
    """Detector of two levels that returns `(B, 4 + classes, N)`, or a list of its levels."""

    def __init__(self, listed: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 8, 8), nn.Conv2d(8, 8, 2, 2)
        self.heads, self.listed = nn.ModuleList(nn.Conv2d(8, 4 + 3, 1) for _ in range(2)), listed

    def forward(self, x: Tensor) -> Any:
        first = self.first(x)
        levels = [head(level) for head, level in zip(self.heads, (first, self.second(first)), strict=True)]
        return levels if self.listed else torch.cat([level.flatten(2) for level in levels], 2)


class Wrapped(nn.Module):
    """Wrapper that returns boxes, scores and labels, as in the docs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        output = self.inner(x)
        output = torch.cat([level.flatten(2) for level in output], 2) if isinstance(output, list) else output
        found = []
        for one in output:
            scores, labels = one[4:].sigmoid().max(0)
            order = scores.argsort(descending=True)
            found.append({"boxes": one[:4].mT[order], "scores": scores[order], "labels": labels[order]})
        return found


@pytest.mark.parametrize("listed", [False, True])
def test_a_wrapped_head_is_explained_at_the_level_of_the_box(listed: bool) -> None:
    torch.manual_seed(0)
    model, pixels = Raw(listed).eval(), torch.rand(1, 3, 64, 96)
    scores = Wrapped(model)(pixels)[0]["scores"].detach()
    flat = torch.cat([level.flatten(2) for level in model(pixels)], 2) if listed else model(pixels)
    order = flat[0, 4:].sigmoid().amax(0).argsort(descending=True)
    for level, here in (("inner.first", order < 96), ("inner.second", order >= 96)):  # 8 x 12 cells of the first level
        number = int(here.nonzero()[0])
        found = visattn.explain(Wrapped(model), pixels=pixels, target=f"box:{number}", method="gradcam")
        assert found.map.facts.layer == level
        assert f"= {float(scores[number]):.3g}" in found.provenance.target[0]


@pytest.mark.parametrize("listed", [False, True])
def test_a_raw_head_is_refused_with_the_way_out(listed: bool) -> None:
    with pytest.raises(OptionError, match=r"boxes, scores and labels.*Detectors of your own"):
        visattn.explain(Raw(listed).eval(), pixels=torch.rand(1, 3, 64, 96), target="box:0", method="gradcam")


@pytest.mark.parametrize("size", [(128, 192), (192, 128), (60, 200), (100, 100)])
def test_a_detector_of_torchvision_gets_the_whole_photo_which_it_neither_resizes_nor_pads(size: tuple[int, int]) -> None:
    plain: dict[str, Any] = {"weights": None, "weights_backbone": None, "min_size": 64, "max_size": 130}
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_fpn(**plain).eval()
    pattern = np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8)
    prepared = visattn.prepare(Image.fromarray(pattern), model)
    assert prepared.geometry.share == pytest.approx(1, abs=0.01)
    assert 0 <= float(prepared.pixels.min()) < float(prepared.pixels.max()) <= 1
    inside, _ = model.transform(list(prepared.pixels))
    mean, std = (torch.tensor(values)[:, None, None] for values in (model.transform.image_mean, model.transform.image_std))
    assert torch.equal(inside.tensors[0], (prepared.pixels[0] - mean) / std)
    assert min(prepared.pixels.shape[2:]) == 64
