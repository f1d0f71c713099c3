"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module, *, frozen: bool = False) -> Iterator[None]:
    """Put a model into evaluation mode; the flag of each module is as before afterwards, also after an error.

    Args:
        model: The model.
        frozen: Whether parameters need no gradient meanwhile, so that no graph is kept for them.

    Yields:
        Nothing.
    """
    modes = {module: module.training for module in model.modules()}
    trained = [parameter for parameter in model.parameters() if frozen and parameter.requires_grad]
    if any(modes.values()):
        model.eval()
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module, training in modes.items():
            module.training = training
