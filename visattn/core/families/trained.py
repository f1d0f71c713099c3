"""Networks trained with visattn: preprocessing and class names.

Everything else is taken from the library that the model came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import timm.data
from torch import Tensor, nn

from visattn._support.language import option
from visattn._support.reprs import in_pixels
from visattn.core.capturing import ModelDescription
from visattn.core.families.feature_maps import last_feature_map
from visattn.core.families.owners import library
from visattn.core.families.spec import STATED, InputSpec
from visattn.core.families.weight_facts import CHANGED, facts_of, state
from visattn.core.provenance import Provenance
from visattn.errors import OptionError

__all__ = ["InputFacts", "evaluation_transform", "remember"]


class InputFacts(Protocol):
    """Preprocessing of a network; see `Blueprint`."""

    @property
    def channels(self) -> int:
        """Number of input channels, 1 or 3."""
        ...

    @property
    def size(self) -> tuple[int, int]:
        """Input size `(height, width)` in pixels."""
        ...

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel."""
        ...

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel."""
        ...


class NetworkFacts(InputFacts, Protocol):
    """Preprocessing of a network, and the names of its classes."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        ...


class _Input(NamedTuple):
    """Preprocessing as it lies on a model."""

    channels: int
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def remember(model: nn.Module, blueprint: NetworkFacts, *, in_training: bool = False) -> nn.Module:
    """Store the blueprint of a model for `prepare` and `labels`; in training it holds for what the weights become too."""
    facts = {"family": "trained", **{name: getattr(blueprint, name) for name in _Input._fields}}
    return state(model, input=facts, classes=blueprint.classes, in_training=in_training)


def _stored(model: nn.Module) -> tuple[_Input, bool]:
    """Return the preprocessing of training, and whether the weights have changed since."""
    facts = facts_of(model)
    assert facts is not None  # noqa: S101 - `owns` has found them
    assert facts.input is not None  # noqa: S101
    return _Input(**{name: facts.input[name] for name in _Input._fields}), facts.changed


def input_spec(model: nn.Module, asked: tuple[int, int] | None = None) -> InputSpec:
    """Return the preprocessing of a trained network: that of training, without augmentation.

    Raises:
        OptionError: If `asked` differs from the size in training.
    """
    blueprint, changed = _stored(model)
    if asked is not None and asked != blueprint.size:
        size, got = in_pixels(blueprint.size), in_pixels(asked)
        raise OptionError(f"the model was trained at {size} pixels, got {got}. Leave {option('img_size')} out.")
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
        sources=dict.fromkeys(STATED, "assumed" if changed else "model"),
        why=CHANGED,
    )


def evaluation_transform(blueprint: InputFacts) -> Any:  # noqa: ANN401 - torchvision's Compose
    """Return the evaluation transform from an image to a tensor: resize to cover the input size, then center crop."""
    return timm.data.create_transform(
        (blueprint.channels, *blueprint.size),
        is_training=False,
        crop_pct=1.0,
        interpolation="bilinear",
        mean=blueprint.mean,
        std=blueprint.std,
    )


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the classes; None if the weights have changed since they were stated."""
    facts = facts_of(model)
    return None if facts is None or facts.changed else facts.classes


def describe(model: nn.Module, provenance: Provenance) -> ModelDescription:
    """Describe the model with the adapter of its own library."""
    description: ModelDescription = library(model).describe(model, provenance)
    return description


def head(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the head according to the adapter of the model's own library."""
    function: Callable[[Tensor], Tensor] | None = library(model).head(model)
    return function


def cam_layer(model: nn.Module) -> str | None:
    """Return the layer chosen by the adapter of the model's own library, else the last feature map before pooling."""
    blueprint, _ = _stored(model)
    name: str | None = library(model).cam_layer(model)
    return name or last_feature_map(model, blueprint.channels, blueprint.size)
