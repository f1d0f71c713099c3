"""Networks that visattn trained: how their pixels are prepared and what their classes are called.

For the rest a network is a model of the library that it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import timm.data
from torch import Tensor, nn

from visattn.capturing import Anatomy
from visattn.errors import OptionError
from visattn.families import custom, timm as of_timm, torchvision as of_torchvision
from visattn.families.feature_maps import last_feature_map
from visattn.families.spec import InputSpec
from visattn.provenance import Provenance


class InputFacts(Protocol):
    """How a network sees pictures; see `Blueprint`."""

    @property
    def channels(self) -> int:
        """1 or 3."""
        ...

    @property
    def size(self) -> tuple[int, int]:
        """In pixels."""
        ...

    @property
    def mean(self) -> tuple[float, ...]:
        """Of each channel."""
        ...

    @property
    def std(self) -> tuple[float, ...]:
        """Likewise."""
        ...


class NetworkFacts(InputFacts, Protocol):
    """How a network sees pictures, and what its classes are called."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        ...


_known: WeakKeyDictionary[nn.Module, NetworkFacts] = WeakKeyDictionary()


def owns(model: nn.Module) -> bool:
    """Whether the model was built from a blueprint that is remembered."""
    return model in _known


def remember(model: nn.Module, blueprint: NetworkFacts) -> nn.Module:
    """Let `prepare` and `labels` know what a model was built from."""
    _known[model] = blueprint
    return model


def input_spec(model: nn.Module, img_size: int | None = None) -> InputSpec:
    """How pixels are prepared: as in training, without augmentation.

    Raises:
        OptionError: If another size is asked for.
    """
    blueprint = _known[model]
    if img_size is not None and blueprint.size != (img_size, img_size):
        raise OptionError(f"the model was trained at {blueprint.size[0]} x {blueprint.size[1]} pixels, got {img_size}.")
    return InputSpec(
        size=blueprint.size,
        dynamic=False,
        stride=(1, 1),
        mean=blueprint.mean,
        std=blueprint.std,
        interpolation="bilinear",
        classifier=True,
        channels=blueprint.channels,
        transform=evaluation_transform(blueprint).transforms,
    )


def evaluation_transform(blueprint: InputFacts) -> Any:  # noqa: ANN401 - torchvision's Compose
    """From a picture to pixels: the shorter side scaled to the input's, the middle cut out."""
    return timm.data.create_transform(
        (blueprint.channels, *blueprint.size),
        is_training=False,
        crop_pct=1.0,
        interpolation="bilinear",
        mean=blueprint.mean,
        std=blueprint.std,
    )


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Names of the classes."""
    return _known[model].classes


def anatomy(model: nn.Module, provenance: Provenance) -> Anatomy:
    """As the model's own library says."""
    found: Anatomy = _library(model).anatomy(model, provenance)
    return found


def head(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """As the model's own library says."""
    known: Callable[[Tensor], Tensor] | None = _library(model).head(model)
    return known


def cam_layer(model: nn.Module) -> str | None:
    """As the model's own library says, else the last feature map before it is pooled."""
    blueprint = _known[model]
    known: str | None = _library(model).cam_layer(model)
    return known or last_feature_map(model, blueprint.channels, blueprint.size)


def _library(model: nn.Module) -> ModuleType:
    return next(family for family in (of_timm, of_torchvision, custom) if family.owns(model))
