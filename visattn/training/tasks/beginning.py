"""Weights that a training begins with: published ones, a file, or those of an own run, whose settings come with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from visattn._support.checks import printable
from visattn._support.language import option
from visattn._support.notes import note
from visattn.core import families
from visattn.core.loading import load_model, model_folders as folders
from visattn.core.loading.blueprints import Blueprint, shared_model
from visattn.errors import OptionError, WeightsError
from visattn.training.config import Recipe
from visattn.training.optimizing import head_of

Kind = TypeVar("Kind", bound=Recipe)


class Beginning(NamedTuple):
    """Weights that a training begins with.

    Attributes:
        tensors: Tensors by name.
        classes: Names of the classes of its outputs; None if they are unknown.
        source: Name for messages.
    """

    tensors: Mapping[str, Tensor]
    classes: tuple[str, ...] | None
    source: str


def run_of(config: Recipe) -> Blueprint | None:
    """Return what the folder of an own run says about its network; None if the weights are of no such run.

    The weights are the folder of a run, `final` in it, or the file in `final`.

    Raises:
        WeightsError: If a folder holds no classifier, or a damaged one.
        OptionError: If the network of the run is another one.
    """
    if config.weights in ("none", "auto"):
        return None
    place = Path(config.weights)
    run = folders.read_run(place) if place.is_dir() else folders.blueprint_beside(place)
    if run is not None and run.model != shared_model(config.model):
        raise OptionError(
            f"{printable(config.weights)}: the weights are those of {printable(run.model)}, got {option('model')} "
            f"{printable(config.model)}. Pass {option('model', run.model)}."
        )
    return run


def going_on(config: Kind, run: Blueprint | None) -> Kind:
    """Return the settings of a training that begins with a run: with the options of its network, unless others are given."""
    return config if run is None else replace(config, model_kwargs=run.options | config.model_kwargs)


def beginning_of(config: Recipe, run: Blueprint | None) -> Beginning:
    """Load the weights that a training begins with.

    Raises:
        WeightsError: If they are not available, or damaged.
    """
    place = Path(config.weights)
    if run is not None:
        return Beginning(folders.run_weights(place), run.classes, printable(place.name))
    model = load_model(config.model, weights=config.weights)
    source = "the published weights" if config.weights == "auto" else printable(place.name)
    return Beginning(model.state_dict(), families.labels(model), source)


def fill(model: nn.Module, begun: Beginning, config: Recipe, classes: Sequence[str]) -> None:
    """Load the weights into a network, and say whether its last layer is kept: only if it outputs the same classes.

    Layers whose shape differs, because of the classes or channels, stay as they are.

    Raises:
        WeightsError: If more than two layers (the first and the last) differ.
    """
    own = model.state_dict()
    plain = {name.replace(".base.", "."): name for name in own}  # attached attention modules wrap a layer as `base`
    loaded = {name.replace(".base.", "."): tensor for name, tensor in begun.tensors.items()}
    fitting = {plain[name]: tensor for name, tensor in loaded.items() if name in plain and own[plain[name]].shape == tensor.shape}
    other = sorted({name.rpartition(".")[0] for name in loaded if plain.get(name) not in fitting})
    if len(other) > 2:
        raise WeightsError(
            f"{config.model}: {len(other)} layers differ from those of {begun.source} ({', '.join(other[:4])}, ...). Use their "
            f"model_kwargs and {option('img_size')}, or pass {option('weights', 'none')}."
        )
    head = [name for name in _head(model, classes) if name in fitting]
    if head and begun.classes not in (None, tuple(classes)):
        note("the last layer is new: the weights are of other classes")
        for name in head:
            del fitting[name]
    elif head:
        known = "same classes" if begun.classes else "same number of outputs; whether they are the same classes is not known"
        note(f"the last layer is kept: {known}")
    model.load_state_dict(fitting, strict=False)


def _head(model: nn.Module, classes: Sequence[str]) -> list[str]:
    """Return the names of the parameters of the last layer; none if there is no layer with one output for each class."""
    try:
        return head_of(model, len(classes))
    except OptionError:
        return []
