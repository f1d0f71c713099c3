"""torchvision detectors, which resize, normalize and pad photos themselves; all else is as in any module."""

from __future__ import annotations

from functools import partial
from typing import Any

from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_tensor

from visattn.core.families.custom import cam_layer, describe, head, labels
from visattn.core.families.spec import InputSpec

__all__ = ["cam_layer", "describe", "head", "input_spec", "labels"]

_ASPECT = 4 / 3  # of most photos


def input_spec(model: Any, asked: tuple[int, int] | None = None) -> InputSpec:  # noqa: ANN401
    """Return the preprocessing before that of the detector: the whole photo in [0, 1], at a size that the detector keeps.

    A detector enlarges or shrinks its input to its own size, and pads it to whole steps. Cells of padding have no place on the photo, so
    the sides are whole steps here.
    """
    inside = model.transform
    channels = len(inside.image_mean)
    return InputSpec(
        size=asked or _kept_size(_ASPECT, inside),
        dynamic=False,
        stride=(1, 1),
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        interpolation="bilinear",
        classifier=False,
        channels=channels,
        transform=(),
        processor=partial(_whole, inside=inside) if channels == 3 else None,
    )


def _whole(photo: Image.Image, inside: Any) -> Tensor:  # noqa: ANN401
    height, width = _kept_size(photo.width / photo.height, inside)
    pixels: Tensor = to_tensor(photo.resize((width, height), Image.Resampling.BILINEAR))
    return pixels


def _kept_size(aspect: float, inside: Any) -> tuple[int, int]:  # noqa: ANN401
    """Return the height and width, near to an aspect, that a transform of torchvision keeps as they are."""
    if inside.fixed_size is not None:
        return inside.fixed_size[1], inside.fixed_size[0]
    short, step = int(inside.min_size[-1]), int(inside.size_divisible)
    long = min(round(short * max(aspect, 1 / aspect) / step), int(inside.max_size) // step) * step
    return (short, max(short, long)) if aspect >= 1 else (max(short, long), short)
