"""Targets that name places in an output: pixels, masks, boxes; the maps equal those of the same score as a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
import transformers
from torch import Tensor, nn

import visattn
from tests.tiny import centered
from visattn.core.pipeline.output_boxes import _matching
from visattn.errors import OptionError

PHOTO = "photo:chelsea"  # 451 x 300 pixels
LABELS = {0: "wall", 1: "cat", 2: "floor", 3: "sky"}


def randomized(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * (0.3 if "attn" in name or "attention" in name else 0.1))
    return model.eval()


def segformer() -> Any:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        id2label=LABELS,
    )
    return centered(randomized(transformers.SegformerForSemanticSegmentation(config)))


def detr() -> Any:
    config = transformers.YolosConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=[64, 96], id2label=LABELS,
        num_detection_tokens=5,
    )  # fmt: skip
    return randomized(transformers.YolosForObjectDetection(config))


def maps(model: Any, target: str, by_hand: Callable[[Any], Tensor], **options: Any) -> visattn.Explanation:
    """Explain a place and the same score by hand; return the former."""
    seen = visattn.explain(model, PHOTO, target=target, **options)
    same = visattn.explain(model, PHOTO, target=by_hand, **options)
    assert float(same.map.values.abs().max()) > 0
    assert torch.equal(seen.map.values, same.map.values)
    return seen


@pytest.mark.parametrize(("x", "y"), [(0, 0), (450, 299), (225, 80), (113.5, 150.2)])
def test_pixel_is_that_of_the_upright_photo(x: float, y: float) -> None:
    model = segformer()
    out = model(visattn.prepare(PHOTO, model, img_size=(64, 96), resize="fit").pixels).logits
    row, column = int(y / 300 * out.shape[2]), int(x / 451 * out.shape[3])
    best = int(out[0, :, row, column].argmax())
    seen = maps(
        model, f"pixel:{x},{y}", lambda out: out.logits[:, best, row, column], method="gradcam",
        layer="segformer.stages.1.layer_norm", img_size=(64, 96), resize="fit",
    )  # fmt: skip
    (text,) = seen.provenance.target
    assert text.startswith(f"logit of {LABELS[best]}, which is predicted at pixel {x:g},{y:g} = ")


def test_class_of_a_segmentation_counts_over_its_own_pixels() -> None:
    model = segformer()
    logits = model(visattn.prepare(PHOTO, model, img_size=(64, 96), resize="fit").pixels).logits[0]
    index = int(logits.argmax(0).flatten().mode().values)
    where = [
        (row, column)
        for row in range(logits.shape[1])
        for column in range(logits.shape[2])
        if logits[:, row, column].argmax() == index
    ]

    def by_hand(out: Any) -> Tensor:
        return torch.stack([out.logits[:, index, row, column] for row, column in where]).mean(0)

    options: dict[str, Any] = {
        "method": "gradcam",
        "layer": "segformer.stages.1.layer_norm",
        "img_size": (64, 96),
        "resize": "fit",
    }
    seen = visattn.explain(model, PHOTO, target=f"mask:{LABELS[index]}", **options)
    same = visattn.explain(model, PHOTO, target=by_hand, **options)
    assert torch.allclose(seen.map.values, same.map.values, rtol=1e-4, atol=1e-7)
    assert f"({len(where) / logits[0].numel():.1%} of the input)" in seen.provenance.target[0]
    absent = next(i for i in LABELS if not bool((logits.argmax(0) == i).any()))
    with pytest.raises(OptionError, match=f"no pixel belongs to {LABELS[absent]}, so it has no score. Pixels belong to "):
        visattn.explain(model, PHOTO, target=f"mask:{absent}", **options)


def test_one_channel_to_which_all_pixels_belong_is_named_alone() -> None:
    last = torch.nn.Conv2d(3, 3, 1)
    torch.nn.init.zeros_(last.weight)
    last.bias = torch.nn.Parameter(torch.tensor([0.0, 0.0, 1.0]))
    model = torch.nn.Sequential(last)
    with pytest.raises(OptionError, match=r"no pixel belongs to channel 1, so it has no score. All belong to channel 2\.$"):
        visattn.explain(model.eval(), PHOTO, target="mask:1", img_size=32)


class OneMask(torch.nn.Module):
    """Segmenter with one channel; `end` is what it does with its logits, `bias` moves all of them."""

    def __init__(self, end: Callable[[Tensor], Tensor], bias: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.ReLU())
        self.head, self.end = torch.nn.Conv2d(8, 1, 1), end
        with torch.no_grad():
            self.head.bias.fill_(bias)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.head(self.body(x)))


@pytest.mark.parametrize(("end", "least", "word"), [(lambda x: x, 0.0, "output"), (torch.sigmoid, 0.5, "value")])
def test_a_single_mask_counts_where_it_is_there_before_and_after_a_sigmoid(
    end: Callable[[Tensor], Tensor], least: float, word: str
) -> None:
    model = OneMask(end, 0.1).eval()
    out = model(visattn.prepare(PHOTO, model, img_size=64).pixels)[0, 0].detach()
    inside = out > least
    assert 0 < int(inside.sum()) < inside.numel()
    seen = maps(model, "mask:0", lambda out: out[:, 0][:, inside].mean(1), method="gradcam", layer="body", img_size=64)
    share, mean = float(inside.float().mean()), float(out[inside].mean())
    assert seen.provenance.target == (
        f"mean {word} of channel 0 over pixels above {least:g} ({share:.1%} of the input) = {mean:.3g}",
    )


@pytest.mark.parametrize(("end", "least"), [(lambda x: x, "0"), (torch.sigmoid, "0.5")])
def test_an_empty_single_mask_says_how_large_it_is(end: Callable[[Tensor], Tensor], least: str) -> None:
    model = OneMask(end, -9.0).eval()
    largest = float(model(visattn.prepare(PHOTO, model, img_size=64).pixels).detach().max())
    with pytest.raises(OptionError) as caught:
        visattn.explain(model, PHOTO, target="mask:0", method="gradcam", layer="body", img_size=64)
    said = f"no pixel belongs to channel 0, so it has no score: its largest value is {largest:.3g}, not above {least}."
    assert said in str(caught.value)


def test_query_of_a_detection_transformer() -> None:
    model = detr()
    out = model(visattn.prepare(PHOTO, model).pixels)
    best = int(out.logits[0, 3, :-1].argmax())  # the last class is no object
    seen = maps(model, "query:3", lambda out: out.logits[:, 3, best], method="relevance")
    assert seen.provenance.target[0].startswith(f"logit of {LABELS[best]} in query 3 = ")


def test_mask_of_a_segmentation_transformer() -> None:
    class Masks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = torch.nn.Conv2d(3, 4, 8, 8)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"masks_queries_logits": self.stem(x)}

    model = randomized(Masks())
    pixels = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    here = model(pixels)["masks_queries_logits"][0, 2] > 0
    by_hand = lambda out: out["masks_queries_logits"][:, 2][:, here].mean(1)  # noqa: E731
    options: dict[str, Any] = {"method": "gradcam", "layer": "stem", "pixels": pixels}
    seen, same = (visattn.explain(model, target=target, **options) for target in ("mask:2", by_hand))
    assert torch.equal(seen.map.values, same.map.values)
    with pytest.raises(OptionError, match="mask:0 to mask:3"):
        visattn.explain(model, target="mask:4", **options)


def test_dense_model_of_torchvision() -> None:
    torch.manual_seed(0)
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3).eval()
    pixels = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    index = int(model(pixels)["out"][0].argmax(0)[10, 20])
    by_hand = lambda out: out["out"][:, index, 10, 20]  # noqa: E731
    seen, same = (
        visattn.explain(model, pixels=pixels, target=target, method="gradcam", layer="backbone.16")
        for target in ("pixel:20,10", by_hand)
    )
    assert torch.equal(seen.map.values, same.map.values)


def test_detection_of_torchvision_is_followed_in_edited_images() -> None:
    found = {
        "boxes": torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]]),
        "labels": torch.tensor([1, 2]),
        "scores": torch.tensor([0.9, 0.4]),
    }
    edited = {
        "boxes": torch.tensor([[21.0, 20, 30, 30], [0, 0, 10, 10]]),
        "labels": torch.tensor([2, 2]),
        "scores": torch.tensor([0.3, 0.8]),
    }
    gone = {name: value[1:] for name, value in edited.items()}

    class Detector(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = torch.nn.Conv2d(3, 1, 8, 8)

        def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
            return [found | {"scores": found["scores"] * (1 + self.stem(one[None]).sum())} for one in x]

    seen = visattn.explain(Detector().eval(), pixels=torch.rand(1, 3, 64, 64), target="box:1", method="gradcam", layer="stem")
    assert seen.provenance.target[0].startswith("score of class 2 in box 1 = ")
    scores = [float(_matching(one, 1, found["boxes"][1:2], 2)) for one in (found, edited, gone)]
    assert scores == pytest.approx([0.4, 0.3, 0.0])


def test_boxes_without_an_area_have_their_own_scores() -> None:
    corners, scores = torch.tensor([[0.0, 0, 10, 10], [20, 20, 20, 30], [20, 20, 20, 30]]), torch.tensor([0.9, 0.6, 0.4])
    found = {"boxes": corners, "labels": torch.tensor([1, 1, 1]), "scores": scores}
    own = [float(_matching(found, index, corners[index : index + 1], 1)) for index in range(3)]
    assert own == pytest.approx([0.9, 0.6, 0.4])


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("pixel:900,10", "lies outside the photo"),
        ("pixel:here", "a pixel target must be pixel:X,Y with numbers"),
        ("pixel:", "x 75 to 376 and y 0 to 300"),
        ("mask:", "mask:0 to mask:3, or a class by name"),
        ("mask:4", "4 masks or classes"),
        ("mask:flor", "Close matches: floor"),
        ("mask:tree", "wall, cat, floor, sky"),
        ("box:1", "target box:N needs a detector"),
    ],
)
def test_places_that_are_not_there(target: str, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        visattn.explain(segformer(), PHOTO, target=target, method="relevance", img_size=64)


def test_a_class_without_known_names_needs_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)).eval()
    with pytest.raises(OptionError, match=r"Pass mask:0 to mask:2; names of classes come with labels=\[...\]"):
        visattn.explain(model, PHOTO, target="mask:cat", method="gradcam", img_size=64)


@pytest.mark.parametrize("options", [{"versus": 1}, {"target_space": "prob"}])
def test_place_has_no_versus(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="has no versus and no target_space"):
        visattn.explain(segformer(), PHOTO, target="mask:1", img_size=64, **options)


def test_classifier_has_no_pixels() -> None:
    with pytest.raises(OptionError, match="needs a dense output"):
        visattn.explain("vit_tiny_patch16_224", PHOTO, weights="none", target="pixel:100,100")


@pytest.mark.parametrize("target", ["query:", "query:x", "query:5", "query:-1"])
def test_a_query_that_is_not_there_is_told_how_many_there_are(target: str) -> None:
    with pytest.raises(OptionError, match=r"5 queries\. Pass query:0 to query:4"):
        visattn.explain(detr(), PHOTO, target=target, method="relevance")


def test_a_photo_without_boxes_is_told_so() -> None:
    class Blind(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = torch.nn.Conv2d(3, 1, 8, 8)

        def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
            none = self.stem(x).flatten()[:0]
            return [{"boxes": none.reshape(0, 4), "labels": none.long(), "scores": none} for _ in x]

    with pytest.raises(OptionError, match="found nothing in this photo"):
        visattn.explain(Blind().eval(), pixels=torch.rand(1, 3, 64, 64), target="box:0", method="gradcam", layer="stem")
