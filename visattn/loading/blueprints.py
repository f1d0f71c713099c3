"""Settings to rebuild a network: a model of any library, its classes and input, and an attention module to insert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import nn

from visattn import models
from visattn._support.checks import printable
from visattn._support.files import base_name
from visattn._support.own_code import is_function
from visattn._support.reprs import brief
from visattn.errors import OptionError, UnsupportedModel
from visattn.loading import own_files, timm_models, torchvision_models
from visattn.nn import ATTENTION, BAM, attach
from visattn.nn.attaching.insertion import Init

_RAM = "visattn_ram"


def _ram(*, attention: str | None, **options: Any) -> nn.Module:  # noqa: ANN401
    """Build the recurrent attention model, which takes no other attention module."""
    if attention:
        raise OptionError(f"visattn_ram has its own attention (glimpses) and takes no other, got {attention}. Leave it at none.")
    return models.RAM(**options)


REFERENCES: dict[str, Callable[..., nn.Module]] = {
    f"visattn_{make.__name__}": make
    for make in (models.resnet14, models.resnet18, models.resnet20, models.resnet50, models.resnet56)
} | {_RAM: _ram}
INITS = ("auto", *get_args(Init))
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
        classes, inside = len(self.classes), self.model in REFERENCES
        attention = None if self.attention == "none" else self.attention
        slot = inside and (self.attention_init in ("auto", "paper") or self.model == _RAM)
        if attention and inside and not slot and ATTENTION[attention] is BAM:
            raise OptionError(
                f"bam is between the stages and starts as in its paper, got attention_init '{self.attention_init}'."
            )
        if is_function(self.model):
            model = own_files.built(self.model, num_classes=classes, in_channels=self.channels, **self.options)
        else:
            try:
                if inside:
                    model = REFERENCES[self.model](
                        attention=attention if slot else None, num_classes=classes, in_channels=self.channels, **self.options
                    )
                elif self.model.startswith(torchvision_models.PREFIX):
                    model = torchvision_models.built(self.model, self.size[0], num_classes=classes, **self.options)
                else:
                    model = timm_models.built(self.model, self.size, num_classes=classes, in_chans=self.channels, **self.options)
            except (OptionError, UnsupportedModel):
                raise
            except (TypeError, ValueError, AssertionError, RuntimeError) as error:
                cause = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise UnsupportedModel(
                    f"{printable(self.model)}: cannot be built ({cause}); check the input size and the model's options."
                ) from error
        if attention and not slot:
            init: Any = "identity" if self.attention_init == "auto" else self.attention_init
            attach(model, attention, init=init, example=torch.zeros(2, self.channels, *self.size))
        return model


def shared(blueprint: Blueprint) -> Blueprint:
    """Return a copy of a blueprint to publish: the model's Python file is named without its folder."""
    return replace(blueprint, model=shared_model(blueprint.model))


def shared_model(model: str) -> str:
    """Return the name of a model; a Python file is named without its folder."""
    file, colon, factory = model.rpartition(":")
    return f"{base_name(file)}{colon}{factory}" if file.endswith(".py") else model


def check_attention(name: str) -> str:
    """Return `name` if it is `none` or names an attention module.

    Raises:
        OptionError: If it is unknown; the message lists all names.
    """
    if name not in ("none", *ATTENTION):
        raise OptionError(f"unknown attention '{printable(name)}'. Known: none, {', '.join(ATTENTION)}.")
    return name
