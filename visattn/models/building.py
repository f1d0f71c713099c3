"""Reference networks by name, and attention in networks of any library: what a trained network is rebuilt from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from visattn.errors import OptionError
from visattn.models.ram import RAM
from visattn.models.resnet import resnet14, resnet18, resnet20, resnet50, resnet56
from visattn.models.stn import TransformedClassifier
from visattn.nn import ATTENTION, BAM, attach

_OWN = {
    "visattn_ram": ("glimpses", RAM),
    "visattn_stn": ("a spatial transformer", TransformedClassifier),
}  # take no other attention


def _alone(name: str, *, attention: str | None, **options: Any) -> nn.Module:  # noqa: ANN401
    """Build a network of `_OWN`."""
    what, make = _OWN[name]
    if attention:
        raise OptionError(f"{name} has its own attention ({what}) and takes no other, got {attention}. Leave it at none.")
    network: nn.Module = make(**options)
    return network


REFERENCES: dict[str, Callable[..., nn.Module]] = {
    f"visattn_{make.__name__}": make for make in (resnet14, resnet18, resnet20, resnet50, resnet56)
} | {name: partial(_alone, name) for name in _OWN}


def has_slot(model: str, attention: str, init: str) -> bool:
    """Check whether a network of `REFERENCES` builds this attention itself; others get it by `insert`.

    Args:
        model: Name of the network.
        attention: A name in `visattn.nn.ATTENTION`.
        init: Initialization of the attention, or `auto`.

    Raises:
        OptionError: If BAM, which is between the stages, is to start otherwise than in its paper.
    """
    if model not in REFERENCES:
        return False
    if init in ("auto", "paper") or model in _OWN:
        return True
    if ATTENTION[attention] is BAM:
        raise OptionError(f"bam is between the stages and starts as in its paper, got attention_init '{init}'.")
    return False


def insert(model: nn.Module, attention: str, init: str, shape: tuple[int, int, int]) -> None:
    """Insert attention at the end of each residual branch.

    Args:
        model: Network of any library.
        attention: A name in `visattn.nn.ATTENTION`.
        init: Initialization of the attention, see `visattn.nn.attach`; `auto` is `identity`.
        shape: Channels, height and width of an input.

    Raises:
        OptionError: If it cannot be inserted.
    """
    start: Any = "identity" if init == "auto" else init
    attach(model, attention, init=start, example=torch.zeros(2, *shape))
