"""The layer of a detector's Grad-CAM: the last feature map through which all of a box's score and corners are computed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.ssd import SSD
from torchvision.ops import MultiScaleRoIAlign

import visattn
from visattn.errors import OptionError

PHOTO = "photo:chelsea"
SIDE = {"min_size": 96, "max_size": 128, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}


class Backbone(nn.Sequential):
    """Three convolutions to a map of an eighth of the image."""

    def __init__(self, channels: int = 16) -> None:
        widths = 3, 8, 12, channels
        convolutions = [nn.Conv2d(few, many, 3, 2, 1) for few, many in pairwise(widths)]
        super().__init__(*(layer for convolution in convolutions for layer in (convolution, nn.ReLU())))
        self.out_channels: Any = channels


class Pyramid(nn.Module):
    """Two levels, of which the second is made from the first."""

    out_channels = 16

    def __init__(self) -> None:
        super().__init__()
        self.body, self.down = Backbone(), nn.Conv2d(16, 16, 3, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.body(x)
        return {"0": first, "1": self.down(first)}


def faster_rcnn() -> Any:
    anchors = AnchorGenerator(((16, 32),), ((1.0,),))
    pool = MultiScaleRoIAlign(["0"], 3, 2)
    return FasterRCNN(
        Backbone(),
        rpn_anchor_generator=anchors,
        box_roi_pool=pool,
        box_score_thresh=0.0,
        box_head=TwoMLPHead(16 * 9, 16),
        box_predictor=FastRCNNPredictor(16, 3),
        **SIDE,
    )


def retinanet() -> Any:
    return RetinaNet(Backbone(), 3, anchor_generator=AnchorGenerator(((16, 32),), ((1.0,),)), score_thresh=0.0, **SIDE)


def fcos() -> Any:
    return FCOS(Backbone(32), 3, anchor_generator=AnchorGenerator(((8,),), ((1.0,),)), score_thresh=0.0, **SIDE)


def ssd() -> Any:
    backbone = Backbone()
    backbone.out_channels = [16]
    return SSD(backbone, DefaultBoxGenerator([[1]]), (96, 96), 3, score_thresh=0.0, image_mean=[0.0] * 3, image_std=[1.0] * 3)


def randomized(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter[0].numel() ** -0.5)
    return model


@pytest.mark.parametrize("build", [faster_rcnn, retinanet, fcos, ssd])
def test_the_map_that_feeds_all_heads_is_found(build: Callable[[], nn.Module]) -> None:
    model = randomized(build)
    made = visattn.explain(model, PHOTO, method="gradcam", target="box:0", img_size=96)
    assert made.map.provenance.parameters["layer"] == "backbone"
    named = visattn.explain(model, PHOTO, method="gradcam", target="box:0", layer="backbone", img_size=96)
    assert torch.equal(made.map.values, named.map.values)
    assert made.map.provenance.target[0].startswith("score of ")


def test_a_box_that_is_not_there_is_said_to_be_missing_and_not_the_layer() -> None:
    model = randomized(retinanet)
    with pytest.raises(OptionError, match=r"target box:9999: the model returned \d+ boxes\. Pass box:0 to box:\d+\."):
        visattn.explain(model, PHOTO, method="gradcam", target="box:9999", img_size=96)


def test_the_level_of_the_box_is_found() -> None:
    anchors = AnchorGenerator(((16,), (48,)), ((1.0,),) * 2)
    model = randomized(
        lambda: RetinaNet(Pyramid(), 3, anchor_generator=anchors, score_thresh=0.0, detections_per_img=200, **SIDE)
    )
    pixels = visattn.prepare(PHOTO, model, img_size=96).pixels
    found: dict[str, str] = {}
    with torch.no_grad():
        boxes = model(list(pixels))[0]["boxes"]
    for number in range(len(boxes)):
        level = level_by_hand(model, pixels, number)
        if level in found.values():
            continue
        made = visattn.explain(model, PHOTO, method="gradcam", target=f"box:{number}", img_size=96)
        found[str(made.map.provenance.parameters["layer"])] = level
        if len(found) == 2:
            break
    assert found == {"backbone.body": "0", "backbone.down": "1"}


def level_by_hand(model: Any, pixels: Tensor, number: int) -> str:
    """Return the level whose map alone, as if it were an input, moves the score of a box."""
    kept: dict[str, Tensor] = {}

    def cut(_module: nn.Module, _args: Any, levels: dict[str, Tensor]) -> dict[str, Tensor]:
        kept.update({name: feature.detach().requires_grad_() for name, feature in levels.items()})
        return dict(kept)

    handle = model.backbone.register_forward_hook(cut)
    score = model(list(pixels))[0]["scores"][number]
    handle.remove()
    slopes = torch.autograd.grad(score, list(kept.values()), allow_unused=True)
    (level,) = (name for name, slope in zip(kept, slopes, strict=True) if slope is not None and bool(slope.any()))
    return level
