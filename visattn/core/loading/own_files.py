"""Models built by a function in the user's Python file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from visattn._support.checks import printable
from visattn._support.own_code import made, running
from visattn.core.loading.translation import fill
from visattn.core.loading.weights import digest, read_tensors
from visattn.core.provenance import Provenance
from visattn.errors import UnsupportedModel


def load(name: str, weights: Path | None = None) -> tuple[nn.Module, Provenance]:
    """Build a model with `file.py:factory`, where `factory` is a function without arguments.

    Args:
        name: File and function.
        weights: Checkpoint to load into the model; it must hold every tensor. None: the file loads its own weights.

    Returns:
        The model in evaluation mode, and its provenance.

    Raises:
        UnsupportedModel: If the file fails to run, or the function is missing or does not return a module.
        WeightsError: If the weights are damaged, or belong to another model.
    """
    file, _, function = name.rpartition(":")
    model = built(name)
    eval_fix = "call it yourself to debug it; no module may contain itself"
    with running(Path(file).parent, f"{printable(name)}: model.eval()", eval_fix, UnsupportedModel):
        model.eval()
    title = f"{Path(file).name}:{function}"
    if weights is None:
        return model, Provenance(model=title, weights="given by the file")
    tensors, notes = read_tensors(weights, model)
    notes += fill(model, tensors, printable(str(weights)))
    return model, Provenance(model=title, weights=printable(weights.name), weights_sha256=digest(weights), notes=notes)


def built(name: str, **arguments: Any) -> nn.Module:  # noqa: ANN401
    """Build a model with `file.py:factory` and these arguments.

    Raises:
        UnsupportedModel: If the file fails to run, or the function is missing or does not return a module.
    """
    model = made(name, UnsupportedModel, **arguments)
    if not isinstance(model, nn.Module):
        factory = name.rpartition(":")[2]
        raise UnsupportedModel(f"{printable(name)}: {factory}() returns a {type(model).__name__}; return a torch.nn.Module.")
    return model
