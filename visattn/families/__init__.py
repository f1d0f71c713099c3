"""What is known of a model that cannot be seen: how it wants its pixels, its classes, what stands for the whole image.

One file for each library. `register` tells it of a class of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from visattn._support.checks import first_line
from visattn.capturing import Anatomy, Attended
from visattn.errors import ModelError, OptionError, VisattnError
from visattn.families import custom, timm, torchvision, trained
from visattn.families.spec import InputSpec
from visattn.provenance import Provenance

__all__ = [
    "FAMILIES",
    "Anatomy",
    "Attended",
    "InputSpec",
    "anatomy",
    "cam_layer",
    "head",
    "input_spec",
    "labels",
    "provenance_of",
    "register",
    "remember",
]

# the first that owns a model answers for it
FAMILIES: dict[str, ModuleType] = {"trained": trained, "timm": timm, "torchvision": torchvision, "custom": custom}

Describe = TypeVar("Describe", bound=Callable[[Any, Provenance], Anatomy])
_registered: dict[type[nn.Module], Callable[[Any, Provenance], Anatomy]] = {}

_sources: WeakKeyDictionary[nn.Module, Provenance] = WeakKeyDictionary()


def register(kind: type[nn.Module]) -> Callable[[Describe], Describe]:
    """Tell what cannot be seen of a model class of your own: which modules give its tokens, and what stands for the whole image.

    >>> @register(MyViT)
    ... def describe(model, provenance):
    ...     return Anatomy({"blocks": model.blocks, "norm": model.norm}, "cls", provenance)

    Args:
        kind: The class; its subclasses count too. The last that was registered answers.

    Returns:
        A decorator for a function of a model and the provenance of its weights that gives an `Anatomy`; with `place=` it also says
        where tokens lie, which are then not followed.
    """

    def decorate(describe: Describe) -> Describe:
        _registered[kind] = describe
        return describe

    return decorate


def input_spec(model: nn.Module, img_size: int | None = None) -> InputSpec:
    """How `model` wants its pixels.

    Raises:
        OptionError: If it does not take `img_size`.
        ModelError: If what the model states of its input makes no sense.
    """  # noqa: DOC501 - errors of ours pass
    try:
        spec: InputSpec = _family_of(model).input_spec(_uncompiled(model), img_size)
        return spec.checked()
    except VisattnError:
        raise
    except Exception as error:  # attributes of a foreign model may be anything
        what = f"what it states of its input cannot be used ({type(error).__name__}: {first_line(error)})"
        raise ModelError(f"{type(model).__name__}: {what}. Give it a size, mean and std that can be.") from error


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Names of the classes, where they are known."""
    known: tuple[str, ...] | None = _family_of(model).labels(_uncompiled(model))
    return known


def head(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """From what any block gives to the model's output, where that is known."""
    known: Callable[[Tensor], Tensor] | None = _family_of(model).head(_uncompiled(model))
    return known


def cam_layer(model: nn.Module) -> str | None:
    """The module whose tokens or feature map Grad-CAM reads, where that is known."""
    known: str | None = _family_of(model).cam_layer(_uncompiled(model))
    return known


def anatomy(model: nn.Module, grid: Sequence[int] | None, prefix: int | Sequence[str]) -> Anatomy:
    """Facts about a model for `capture`; `grid` and `prefix` tell where tokens lie.

    Raises:
        OptionError: If they make no sense.
    """
    provenance = provenance_of(model)
    if grid is not None:
        return custom.told(model, grid, prefix, provenance)
    if prefix:
        raise OptionError("prefix tells where tokens lie together with grid. Pass grid=(rows, columns) too.")
    for kind, describe in reversed(_registered.items()):
        if isinstance(model, kind):
            return replace(describe(model, provenance), stated=True)
    found: Anatomy = _family_of(model).anatomy(model, provenance)
    return found


def provenance_of(model: nn.Module) -> Provenance:
    """Where a model's weights came from."""
    if model not in _sources:
        _sources[model] = Provenance(model=type(model).__name__, weights="given with the model")
    return _sources[model]


def remember(model: nn.Module, provenance: Provenance) -> None:
    """Keep where a model's weights came from, for every picture that is made with it."""
    _sources[model] = provenance


def _family_of(model: nn.Module) -> ModuleType:
    return next(family for family in FAMILIES.values() if family.owns(_uncompiled(model)))


def _uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given; any other model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model
