"""Size limits for networks built from the settings in a file: relative to the weights that come with it, or absolute."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from visattn.errors import UnsupportedModel

__all__ = ["no_larger_than"]

_TIMES, _MORE = 10, 100_000_000  # slack: a captioner saves its encoder without the classifier, nine tenths of VGG's parameters
_MODULES, _MORE_MODULES = 20, 2_000  # for each tensor, and more: many modules have none
MOST, MOST_MODULES = 20_000_000_000, 50_000  # without weights; the largest published vision model has a third of both


@contextmanager
def no_larger_than(weights: Mapping[str, Tensor], name: str, fix: str) -> Iterator[None]:
    """Stop building a network in this thread once it has far more parameters or modules than its weights.

    Args:
        weights: Tensors by name.
        name: Name of the network, for the message.
        fix: What to do then, for the message.

    Yields:
        Nothing.

    Raises:
        UnsupportedModel: Inside the `with` block, if the network is too large.
    """
    numbers = _TIMES * sum(tensor.numel() for tensor in weights.values()) + _MORE
    modules = _MODULES * len(weights) + _MORE_MODULES
    with _bounded(numbers, modules, f"{name}: its options make a network far larger than its weights; {fix}."):
        yield


@contextmanager
def buildable(name: str) -> Iterator[None]:
    """Stop building a network in this thread once it has more parameters or modules than any machine needs.

    Args:
        name: Name of the network, for the message.

    Yields:
        Nothing.

    Raises:
        UnsupportedModel: Inside the `with` block, if the network is too large.
    """
    many = f"more than {MOST // 10**9} billion parameters or {MOST_MODULES:,} modules"
    with _bounded(MOST, MOST_MODULES, f"{name}: its configuration asks for {many}; check the file."):
        yield


@contextmanager
def _bounded(numbers: int, modules: int, message: str) -> Iterator[None]:
    mine = threading.get_ident()

    def register(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        nonlocal numbers
        if threading.get_ident() == mine and parameter is not None:
            numbers -= parameter.numel()
            if numbers < 0:
                raise UnsupportedModel(message)

    def count(_module: nn.Module, _name: str, _part: nn.Module | None) -> None:
        nonlocal modules
        if threading.get_ident() == mine:
            modules -= 1
            if modules < 0:
                raise UnsupportedModel(message)

    hooks = register_module_parameter_registration_hook(register), register_module_module_registration_hook(count)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
