"""Ultralytics models, told by their classes; the package is not imported. All else is as in any module.

Sources: the predictors of ultralytics 8.4: preprocessing, thresholds, and the rows that the heads return.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.ops import batched_nms, box_convert
from torchvision.transforms.functional import center_crop, resize, to_tensor

from visattn._support.types import Task
from visattn.core.families.custom import cam_layer, channels_of, describe
from visattn.core.families.spec import InputSpec

__all__ = ["cam_layer", "describe", "detections", "head", "input_spec", "labels", "task"]

_STEP = 32  # sides are multiples of it, or of the largest stride
_OF_CLASSIFIERS, _OF_DETECTORS = 224, 640  # usual sides of images
_SCORE, _OVERLAP, _MOST = 0.25, 0.7, 300  # least score, largest overlap within a class, number of detections of an image
_ROTATED = ("OBB", "OBB26")


def head(_model: nn.Module) -> None:
    """Return None: the layers behind the blocks are unknown."""


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the classes that the model carries; None if they are only numbers."""
    names = getattr(model, "names", None)
    if not isinstance(names, dict) or list(names) != list(range(len(names))):
        return None
    texts = tuple(str(name) for name in names.values())
    return None if all(re.fullmatch(r"(class)?\d+", text) for text in texts) else texts


def task(model: nn.Module) -> Task | None:
    """Return what the outputs of a model are: classes, if it is a classifier."""
    return "classes" if type(_last(model)).__name__ == "Classify" else None


def input_spec(model: Any, asked: tuple[int, int] | None = None) -> InputSpec:  # noqa: ANN401
    """Return the preprocessing of the predictors: pixels in [0, 1]; the whole photo, or the middle square for a classifier.

    A detector pads the shorter side to whole steps. Cells of padding have no place on the photo, so here that side is resized to whole
    steps instead.
    """
    classifies, channels = task(model) == "classes", channels_of(model)
    trained_at = _side(model)
    long = trained_at or (_OF_CLASSIFIERS if classifies else _OF_DETECTORS)
    step = max(_STEP, int(torch.as_tensor(getattr(model, "stride", _STEP)).max()))
    photo = partial(_middle, side=long) if classifies else partial(_whole, long=long, step=step)
    return InputSpec(
        size=asked or ((long, long) if classifies else _size(4 / 3, long, step)),
        dynamic=True,
        stride=(1, 1),
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        interpolation="bilinear",
        classifier=classifies,
        channels=channels,
        transform=(),
        sources={"size": "given" if asked else "model" if trained_at else "assumed", "mean": "model", "std": "model"},
        processor=photo if channels == 3 else None,
        why="the model carries no settings of its training",
    )


def detections(model: nn.Module, output: Any) -> Any:  # noqa: ANN401 - a model's own
    """Return boxes (left, top, right, bottom in pixels of the input), scores and labels of each image, as the predictor keeps them.

    The output of a model without such boxes is returned as it is. Scores and boxes keep their gradient.
    """
    last, rows = _last(model), output
    while isinstance(rows, (tuple, list)) and rows:
        rows = rows[0]
    classes = getattr(last, "nc", None)
    if not isinstance(classes, int) or type(last).__name__ in _ROTATED or not isinstance(rows, Tensor) or rows.ndim != 3:
        return output
    if getattr(last, "end2end", False):  # (B, detections, 6 and more)
        return [_listed(one[one[:, 4] > _SCORE]) for one in rows]
    if rows.shape[1] < 4 + classes:
        return output
    return list(_suppressed(rows, classes, is_corners=bool(getattr(last, "xyxy", False))))


def _last(model: Any) -> Any:  # noqa: ANN401
    """Return the head of a model, its last layer; None if it has no layers."""
    layers = getattr(model, "model", None)
    return layers[-1] if isinstance(layers, nn.Sequential) and len(layers) else None


def _suppressed(rows: Tensor, classes: int, *, is_corners: bool) -> Iterator[dict[str, Tensor]]:
    """Yield the detections in rows `(B, 4 + classes and more, N)` that overlap no better one of their class."""
    for row in rows.transpose(1, 2):
        boxes, chances = row[:, :4], row[:, 4 : 4 + classes]
        corners = boxes if is_corners else box_convert(boxes, "cxcywh", "xyxy")
        scores, of_class = chances.max(1)
        likely = scores > _SCORE
        corners, scores, of_class = corners[likely], scores[likely], of_class[likely]
        kept = batched_nms(corners.detach().float(), scores.detach().float(), of_class, _OVERLAP)[:_MOST]
        yield {"boxes": corners[kept], "scores": scores[kept], "labels": of_class[kept]}


def _listed(rows: Tensor) -> dict[str, Tensor]:
    return {"boxes": rows[:, :4], "scores": rows[:, 4], "labels": rows[:, 5].long()}


def _side(model: Any) -> int | None:  # noqa: ANN401
    """Return the side of the images that a model was trained at; None if it does not carry its settings."""
    settings = getattr(model, "args", None)
    side = settings.get("imgsz") if isinstance(settings, dict) else getattr(settings, "imgsz", None)
    return side if isinstance(side, int) and side > 0 else None


def _whole(photo: Image.Image, long: int, step: int) -> Tensor:
    height, width = _size(photo.width / photo.height, long, step)
    pixels: Tensor = to_tensor(photo.resize((width, height), Image.Resampling.BILINEAR))
    return pixels


def _middle(photo: Image.Image, side: int) -> Tensor:
    pixels: Tensor = to_tensor(center_crop(resize(photo, [side]), [side]))
    return pixels


def _size(aspect: float, long: int, step: int) -> tuple[int, int]:
    """Return the height and width, in whole steps, of a photo whose longer side is resized."""
    long = max(round(long / step), 1) * step
    short = max(round(long * min(aspect, 1 / aspect) / step), 1) * step
    return (short, long) if aspect >= 1 else (long, short)
