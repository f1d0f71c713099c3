"""Facts about a model that cannot be traced: preprocessing of its input, names of its classes, and the token that represents the image.

There is one file per model library. `register` adds a model class of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn

from visattn._support.checks import first_line
from visattn._support.types import Task
from visattn.core.capturing import ModelDescription
from visattn.core.families.owners import FAMILIES, family, owner
from visattn.core.families.spec import InputSpec, declared_preprocessing, sides
from visattn.core.families.weight_facts import facts_of, state
from visattn.core.families.wrappers import receiver, unwrapped
from visattn.core.provenance import Provenance
from visattn.errors import ModelError, OptionError, VisattnError

__all__ = [
    "FAMILIES",
    "InputSpec",
    "ModelDescription",
    "cam_layer",
    "describe",
    "head",
    "input_spec",
    "labels",
    "provenance_of",
    "register",
    "remember",
    "task",
]

Describe = TypeVar("Describe", bound=Callable[[Any, Provenance], ModelDescription])
_registered: dict[type[nn.Module], Callable[[Any, Provenance], ModelDescription]] = {}


def register(kind: type[nn.Module]) -> Callable[[Describe], Describe]:
    """Register a function that describes a model class of your own: modules that output tokens, and the token that represents the image.

    >>> @register(MyViT)
    ... def describe(model, provenance):
    ...     return ModelDescription({"blocks": model.blocks, "norm": model.norm}, "cls", provenance)

    Args:
        kind: The class; subclasses are included. The last registered match is used.

    Returns:
        A decorator for a function that takes a model and the provenance of its weights, and returns a `ModelDescription`. If that has a
        `place`, it gives the positions of tokens, which are then not traced.
    """

    def decorate(describe: Describe) -> Describe:
        _registered[kind] = describe
        return describe

    return decorate


def input_spec(model: nn.Module, img_size: int | Sequence[int] | None = None) -> InputSpec:
    """Return the input size and preprocessing that `model` expects; `img_size`, a side or `(height, width)`, asks for another size.

    Raises:
        OptionError: If the model does not take `img_size`.
        ModelError: If the input settings declared by the model are invalid.
    """  # noqa: DOC501 - our own errors are passed on
    try:
        bare = unwrapped(model)
        inner = None if declared_preprocessing(bare) else receiver(bare)
        stating = bare if inner is None else inner
        spec: InputSpec = _family_of(stating).input_spec(stating, sides(img_size))
        return spec.checked() if inner is None else replace(spec, classifier=True).checked()
    except VisattnError:
        raise
    except Exception as error:  # attributes of a foreign model may be anything
        what = f"its declared input settings cannot be used ({type(error).__name__}: {first_line(error)})"
        raise ModelError(f"{type(model).__name__}: {what}. Give the model a valid size, mean and std.") from error


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the classes, or None if they are unknown."""
    names: tuple[str, ...] | None = _family_of(model).labels(unwrapped(model))
    return names


def task(model: nn.Module) -> Task | None:
    """Return what the outputs of a model are, if it states that."""
    own: Callable[[nn.Module], Task | None] | None = getattr(_family_of(model), "task", None)
    return None if own is None else own(unwrapped(model))


def detections(model: nn.Module, output: Any) -> Any:  # noqa: ANN401 - a model's own
    """Return an output as boxes, scores and labels of each image, if the family of its model says where they are; else as it is."""
    own: Callable[[nn.Module, Any], Any] | None = getattr(_family_of(model), "detections", None)
    return output if own is None else own(unwrapped(model), output)


def head(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a function from the output of any block to the output of the model, or None if it is unknown."""
    function: Callable[[Tensor], Tensor] | None = _family_of(model).head(unwrapped(model))
    return function


def cam_layer(model: nn.Module) -> str | None:
    """Return the name of the module whose tokens or feature map Grad-CAM reads, or None if it is unknown."""
    name: str | None = _family_of(model).cam_layer(unwrapped(model))
    return name


def describe(model: nn.Module, grid: Sequence[int] | None, prefix: int | Sequence[str]) -> ModelDescription:
    """Describe a model for `capture`; `grid` and `prefix` give the positions of tokens, otherwise tokens are traced.

    Raises:
        OptionError: If `grid` or `prefix` is invalid.
    """
    provenance = provenance_of(model)
    if grid is not None:
        stated: ModelDescription = family("custom").told(model, grid, prefix, provenance)
        return stated
    if prefix:
        raise OptionError("prefix needs grid to give the positions of tokens, got no grid. Pass grid=(rows, columns) too.")
    for kind, registered in reversed(_registered.items()):
        if isinstance(model, kind):
            return replace(registered(model, provenance), stated=True)
    description: ModelDescription = _family_of(model).describe(model, provenance)
    return description


def provenance_of(model: nn.Module) -> Provenance:
    """Return the provenance of a model's weights."""
    facts = facts_of(model)
    if facts is not None and facts.provenance is not None:
        return facts.provenance
    return Provenance(model=type(model).__name__, weights="given with the model")


def remember(model: nn.Module, provenance: Provenance) -> None:
    """Record the provenance of a model's weights; it is attached to every map made with the model."""
    state(model, provenance=provenance)


def _family_of(model: nn.Module) -> Any:  # noqa: ANN401 - a module
    return family(owner(unwrapped(model)))
