"""Which family a model belongs to, told by its class and by what lies on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from timm.models import PretrainedCfg
from torch import nn

from visattn.core.families.weight_facts import family_of

__all__ = ["owner"]


def _is_of(model: nn.Module, modules: str) -> bool:
    """Check whether a model's class is of some modules, or derived from one of them."""
    return any(kind.__module__.startswith(modules) for kind in type(model).__mro__)


def _is_of_timm(model: nn.Module) -> bool:
    """Check whether a model is of timm, or was built by timm."""
    return isinstance(vars(model).get("pretrained_cfg"), (Mapping, PretrainedCfg)) or _is_of(model, "timm.")


def _is_of_torchvision(model: nn.Module) -> bool:
    """Check whether a model is a torchvision classifier; models in subpackages (detection, segmentation, video) are not."""
    return any(kind.__module__.rpartition(".")[0] == "torchvision.models" for kind in type(model).__mro__)


OWNS: Mapping[str, Callable[[nn.Module], bool]] = {  # the first that owns a model describes it
    "trained": lambda model: family_of(model) == "trained",
    "timm": _is_of_timm,
    "torchvision": _is_of_torchvision,
    "torchvision_detection": lambda model: hasattr(model, "transform") and _is_of(model, "torchvision.models.detection."),
    "torchvision_segmentation": lambda model: _is_of(model, "torchvision.models.segmentation."),
    "ultralytics": lambda model: _is_of(model, "ultralytics.nn.tasks"),
    "huggingface": lambda model: hasattr(model, "config") and _is_of(model, "transformers."),
    "custom": lambda _: True,
}
FAMILIES = tuple(OWNS)


@cache
def family(name: str) -> Any:  # noqa: ANN401 - a module
    """Return the file of a family; it is imported when a model of the family is first met."""
    return import_module(f"{__package__}.{name}")


def owner(model: nn.Module) -> str:
    """Return the name of the first family that owns a model; `custom` takes any."""
    return next(name for name, owns in OWNS.items() if owns(model))


def library(model: nn.Module) -> Any:  # noqa: ANN401 - a module
    """Return the family of the library that a model comes from, whoever trained it."""
    return next(family(name) for name, owns in OWNS.items() if name != "trained" and owns(model))
