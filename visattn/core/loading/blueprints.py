"""Settings to rebuild a network: a model of any library, its classes and input, and an attention module to insert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from visattn._support.checks import printable
from visattn._support.files import base_name
from visattn._support.own_code import is_function
from visattn._support.reprs import brief
from visattn.core.loading import own_files, timm_models, torchvision_models
from visattn.core.loading.prefixes import TORCHVISION
from visattn.core.offers import offered
from visattn.errors import OptionError, UnsupportedModel

__all__ = ["Blueprint", "shared", "shared_model"]

_ELSEWHERE = {  # options with which timm and torchvision would read files or access the network
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "scriptable",
    "weights",
    "weights_backbone",
}


@dataclass(frozen=True)
class Blueprint:
    """Settings that a network is built from, and the preprocessing of its input.

    Attributes:
        model: A timm name, `tv:` and a torchvision name, `file.py:factory` (called with `num_classes` and `in_channels`), or one of our
            networks, for example `visattn_resnet20`.
        classes: Names of the classes.
        channels: Input channels: 1 for gray images, 3 for color.
        size: `(height, width)` of the input in pixels.
        mean: Mean of each channel, for pixels in [0, 1].
        std: Standard deviation of each channel, for pixels in [0, 1].
        attention: `none` or a name in `visattn.nn.ATTENTION`. It ends each residual branch; BAM in our own networks is between the stages.
        options: Keyword arguments for the function that builds the network.
        attention_init: Initialization of the attention, see `visattn.nn.attach`; `auto` is `paper` in our own networks, which have a slot
            for it, and `identity` in others.
    """

    model: str
    classes: tuple[str, ...]
    channels: int
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    attention: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    attention_init: str = "auto"

    __repr__ = brief

    def build(self) -> nn.Module:
        """Build the network with random weights from the current random state.

        Raises:
            UnsupportedModel: If there is no such model, or it rejects the options.
            OptionError: If the attention is unknown or cannot be inserted.
        """
        foreign = sorted(_ELSEWHERE & set(self.options))
        if foreign:
            raise OptionError(f"{printable(self.model)}: options must not load weights, got {', '.join(foreign)}. Remove them.")
        attention = None if self.attention == "none" else self.attention
        ours = offered("networks", "visattn") if attention or self.model.startswith("visattn_") else None
        slot = attention if ours and attention and ours.has_slot(self.model, attention, self.attention_init) else None
        model = self._built(ours.REFERENCES.get(self.model) if ours else None, slot)
        if ours and attention and not slot:
            ours.insert(model, attention, self.attention_init, (self.channels, *self.size))
        return model

    def _built(self, reference: Callable[..., nn.Module] | None, attention: str | None) -> nn.Module:
        """Build the network: a reference network with this attention, or one of a file or a library."""
        classes = len(self.classes)
        if is_function(self.model):
            return own_files.built(self.model, num_classes=classes, in_channels=self.channels, **self.options)
        try:
            if reference is not None:
                return reference(attention=attention, num_classes=classes, in_channels=self.channels, **self.options)
            if self.model.startswith(TORCHVISION):
                return torchvision_models.built(self.model, self.size[0], num_classes=classes, **self.options)
            return timm_models.built(self.model, self.size, num_classes=classes, in_chans=self.channels, **self.options)
        except (OptionError, UnsupportedModel):
            raise
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UnsupportedModel(
                f"{printable(self.model)}: cannot be built ({cause}); check the input size and the model's options."
            ) from error


def shared(blueprint: Blueprint) -> Blueprint:
    """Return a copy of a blueprint to publish: the model's Python file is named without its folder."""
    return replace(blueprint, model=shared_model(blueprint.model))


def shared_model(model: str) -> str:
    """Return the name of a model; a Python file is named without its folder."""
    file, colon, factory = model.rpartition(":")
    return f"{base_name(file)}{colon}{factory}" if file.endswith(".py") else model
