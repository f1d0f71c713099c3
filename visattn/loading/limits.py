"""Size limit for networks built from the settings in a file, relative to the weights that come with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from visattn.errors import UnsupportedModel

_TIMES, _MORE = 10, 100_000_000  # slack: a captioner saves its encoder without the classifier, nine tenths of VGG's parameters


@contextmanager
def no_larger_than(weights: Mapping[str, Tensor], name: str) -> Iterator[None]:
    """Stop building a network in this thread once it has far more parameters than its weights.

    Args:
        weights: Tensors by name.
        name: Name of the network, for the message.

    Yields:
        Nothing.

    Raises:
        UnsupportedModel: Inside the `with` block, if the network is too large.
    """
    room = _TIMES * sum(tensor.numel() for tensor in weights.values()) + _MORE
    mine = threading.get_ident()

    def register(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        nonlocal room
        if threading.get_ident() == mine and parameter is not None:
            room -= parameter.numel()
            if room < 0:
                raise UnsupportedModel(f"{name}: its options make a network far larger than its weights; copy the folder again.")

    hook = register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        hook.remove()
