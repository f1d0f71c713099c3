"""Removal of wrappers around a model: those that parallelize, compile or average it, and modules that only pass on what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import torch
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import distributed, nn
from torch.optim.swa_utils import AveragedModel

from visattn._support.faces import Later
from visattn._support.memory import OfStructure
from visattn.core.families.owners import owner
from visattn.core.families.weight_facts import family_of
from visattn.errors import UnsupportedModel

if TYPE_CHECKING:
    from visattn.core.families import passing
else:
    passing = Later("visattn.core.families.passing")

__all__ = ["unwrapped"]

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel, ModelEmaV2, ModelEmaV3)
_SHARDED = "FullyShardedDataParallel"


_passing: OfStructure[passing.Passing | None] = OfStructure()


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that parallelize, compile or average it, or pass on what they are given.

    Raises:
        UnsupportedModel: If the parameters are sharded across processes, or DTensors.
    """
    if not hasattr(model, "modules"):  # an exported program: `capture` refuses it
        return model
    while isinstance(model, _WRAPPERS) or isinstance(getattr(model, "_orig_mod", None), nn.Module):
        model = model.module if isinstance(model, _WRAPPERS) else model._orig_mod  # type: ignore[assignment]
    if type(model).__module__.startswith("ultralytics.models.") and isinstance(model.model, nn.Module):
        return model.model  # of YOLO, whose call loads files and predicts
    split, dtensors = type(model).__name__ == _SHARDED, False
    if distributed.is_available() and distributed.is_initialized():  # looking at every module and parameter takes milliseconds
        split = split or any(type(module).__name__ == _SHARDED for module in model.modules())
        dtensors = any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    if split or dtensors:
        raise UnsupportedModel(
            f"{type(model).__name__}: its parameters are {'sharded' if split else 'DTensors'}, so the main process cannot draw alone. "
            "Draw from a checkpoint, with visattn.explain."
        )
    inner, passes = _inside(model)
    return unwrapped(inner) if inner is not None and passes is not None and passes.back else model


def receiver(model: nn.Module) -> nn.Module | None:
    """Return the model of a known family inside `model` that receives its input unchanged, whatever becomes of the output, or None."""
    inner, passes = _inside(model)
    return inner if passes is not None and passes.on else None


def _inside(model: nn.Module) -> tuple[nn.Module | None, passing.Passing | None]:
    """Return the only model of a known family inside `model`, and whether input and output pass unchanged; None if that is not known.

    One forward pass shows it, if no operation runs outside of the inner model (for the input: before it). Nothing can then decide what
    happens to another image.
    """
    if isinstance(model, torch.jit.ScriptModule) or _is_known(model):
        return None, None
    inside = _known_models(model, "", {model})
    name, inner = next(inside, ("", None))
    if inner is None or next(inside, None) is not None:
        return None, None
    return inner, _passing.of(model, name, lambda: passing.passes(model, inner))


def _is_known(model: nn.Module) -> bool:
    """Check whether a model is of a family that states facts about its models."""
    return owner(model) != "custom"


def _known_models(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost models of known families inside a module, with their names, but those that were `seen`."""
    for name, child in module.named_children():
        if child in seen:
            continue
        seen.add(child)
        if _is_model(child):
            yield f"{prefix}{name}", child
        else:
            yield from _known_models(child, f"{prefix}{name}.", seen)


def _is_model(module: nn.Module) -> bool:
    """Check whether a module is a whole model of a known family, and not a part of one."""
    own = vars(module)
    return (
        "pretrained_cfg" in own
        or bool(family_of(module))
        or (
            _of_library(type(module))  # type: ignore[arg-type]
            and _is_known(module)
        )
    )


@cache
def _of_library(kind: type[nn.Module]) -> bool:
    """Check whether a class is one of torchvision, transformers or Ultralytics, or derived from one."""
    return any(base.__module__.partition(".")[0] in ("torchvision", "transformers", "ultralytics") for base in kind.__mro__)
