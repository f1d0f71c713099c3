"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from visattn._support.checks import first_line
from visattn.errors import ModelError


@contextmanager
def evaluating(model: nn.Module, *, frozen: bool = False) -> Iterator[None]:
    """Put a model into evaluation mode; the flag of each module is as before afterward, also after an error.

    Args:
        model: The model.
        frozen: Whether parameters need no gradient meanwhile, so that no graph is kept for them.

    Yields:
        Nothing.

    Raises:
        ModelError: If the model cannot be put into evaluation mode, as one that holds itself.
    """
    modes = {module: module.training for module in model.modules()}
    trained = [parameter for parameter in model.parameters() if frozen and parameter.requires_grad]
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
            module.training = training


def _evaluate(model: nn.Module) -> None:
    try:
        model.eval()
    except Exception as error:  # of a model's own `eval` or `train`
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(
            f"{type(model).__name__}: model.eval() fails: {what}. Call it by itself; no module may hold itself."
        ) from error
