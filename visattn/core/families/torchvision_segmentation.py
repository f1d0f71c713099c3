"""torchvision segmentation networks, which were evaluated on whole photos; all else is as in any module."""

from __future__ import annotations

from functools import partial
from typing import Any

from PIL import Image
from torch import Tensor, nn
from torchvision.models.segmentation import LRASPP_MobileNet_V3_Large_Weights
from torchvision.transforms.functional import normalize, to_tensor

from visattn.core.families.custom import cam_layer, channels_of, describe, head, labels
from visattn.core.families.spec import InputSpec, per_channel, sources
from visattn.core.families.weight_facts import CHANGED, facts_of, why_unknown

__all__ = ["cam_layer", "describe", "head", "input_spec", "labels"]

_PRESET: Any = LRASPP_MobileNet_V3_Large_Weights.DEFAULT.transforms()  # that of all published weights
_ASPECT = 4 / 3  # of most photos


def input_spec(model: nn.Module, asked: tuple[int, int] | None = None) -> InputSpec:
    """Return the preprocessing of torchvision: the whole photo, its shorter side resized to 520 pixels, and ImageNet's mean and deviation.

    They are assumed where the weights are not known to be those that torchvision published.
    """
    facts, channels = facts_of(model), channels_of(model)
    is_published = facts is not None and facts.classes is not None and not facts.changed
    return InputSpec(
        size=asked or _size(_ASPECT),
        dynamic=True,
        stride=(1, 1),
        mean=per_channel(_PRESET.mean, channels),
        std=per_channel(_PRESET.std, channels),
        interpolation="bilinear",
        classifier=False,
        channels=channels,
        transform=(),
        sources=sources(
            vars(_PRESET) if is_published else {}, "given" if asked else "model" if is_published else "assumed", channels
        ),
        processor=partial(_whole, mean=_PRESET.mean, std=_PRESET.std) if is_published and channels == 3 else None,
        why=CHANGED if facts is not None and facts.changed else why_unknown(facts),
    )


def _whole(photo: Image.Image, mean: list[float], std: list[float]) -> Tensor:
    height, width = _size(photo.width / photo.height)
    pixels: Tensor = normalize(to_tensor(photo.resize((width, height), Image.Resampling.BILINEAR)), mean, std)
    return pixels


def _size(aspect: float) -> tuple[int, int]:
    """Return the height and width of a photo whose shorter side is resized, rounded down as torchvision does."""
    short = int(_PRESET.resize_size[0])
    return (short, int(short * aspect)) if aspect >= 1 else (int(short / aspect), short)
