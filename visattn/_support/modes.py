"""Context managers: evaluation mode, and random numbers that a dry run must not use up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from visattn._support.checks import first_line
from visattn.errors import ModelError


@contextmanager
def same_randomness() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch (CPU) after the block.

    Yields:
        Nothing.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - the one that models use
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Begin the random numbers of Python, NumPy and torch with a seed; restore their states after the block.

    A model may draw in its forward pass, also in evaluation mode.

    Yields:
        Nothing.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    number = int(seed)
    with same_randomness(), torch.random.fork_rng(devices):
        random.seed(number)
        np.random.seed(number % 2**32)  # noqa: NPY002
        torch.manual_seed(number % 2**64)
        yield


@contextmanager
def evaluating(model: nn.Module, *, frozen: bool = False) -> Iterator[None]:
    """Put a model into evaluation mode temporarily; the mode of each module is restored on exit, also after an error.

    Args:
        model: The model.
        frozen: Whether to disable gradients of the parameters inside the block, so that no graph is kept for them.

    Yields:
        Nothing.

    Raises:
        ModelError: If the model cannot be put into evaluation mode, for example because it contains itself.
    """
    modes = {module: module.training for module in model.modules()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad] if frozen else []
    try:
        if any(modes.values()):
            _evaluate(model)
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module, training in modes.items():
            if module.training is not training:  # setting an attribute of a module is slow
                module.training = training


def _evaluate(model: nn.Module) -> None:
    try:
        model.eval()
    except Exception as error:  # a model may override `eval` or `train`
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(
            f"{type(model).__name__}: model.eval() fails: {what}. Call it yourself to debug it; no module may contain itself."
        ) from error
