"""Removal of wrappers around a model: those that parallelize, compile or average it, and modules that only pass on what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import distributed, nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from visattn._support.attempts import Attempt
from visattn._support.memory import OfStructure
from visattn._support.modes import evaluating, own_modes, same_randomness
from visattn.core.families.facts import family_of
from visattn.core.families.owners import FAMILIES, owner
from visattn.core.families.spec import InputSpec
from visattn.errors import UnsupportedModel

__all__ = ["unwrapped"]

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel, ModelEmaV2, ModelEmaV3)
_SHARDED = "FullyShardedDataParallel"


class _Passing(NamedTuple):
    """Answers for a module: does it pass its input on unchanged, and does it then return the output unchanged?"""

    on: bool = False
    back: bool = False


_passing: OfStructure[_Passing | None] = OfStructure()


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that parallelize, compile or average it, or pass on what they are given.

    Raises:
        UnsupportedModel: If the parameters are sharded across processes, or DTensors.
    """
    if not hasattr(model, "modules"):  # an exported program: `capture` refuses it
        return model
    while isinstance(model, _WRAPPERS) or isinstance(getattr(model, "_orig_mod", None), nn.Module):
        model = model.module if isinstance(model, _WRAPPERS) else model._orig_mod  # type: ignore[assignment]
    split, dtensors = type(model).__name__ == _SHARDED, False
    if distributed.is_available() and distributed.is_initialized():  # looking at every module and parameter takes milliseconds
        split = split or any(type(module).__name__ == _SHARDED for module in model.modules())
        dtensors = any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    if split or dtensors:
        raise UnsupportedModel(
            f"{type(model).__name__}: its parameters are {'sharded' if split else 'DTensors'}, so the main process cannot draw alone. "
            "Draw from a checkpoint, with visattn.explain."
        )
    inner, passing = _inside(model)
    return unwrapped(inner) if inner is not None and passing.back else model


def receiver(model: nn.Module) -> nn.Module | None:
    """Return the model of a known family inside `model` that receives its input unchanged, whatever becomes of the output, or None."""
    inner, passing = _inside(model)
    return inner if passing.on else None


def _inside(model: nn.Module) -> tuple[nn.Module | None, _Passing]:
    """Return the only model of a known family inside `model`, and whether input and output pass unchanged.

    One forward pass shows it, if no operation runs outside of the inner model (for the input: before it). Nothing can then decide what
    happens to another image.
    """
    if isinstance(model, torch.jit.ScriptModule) or _is_known(model):
        return None, _Passing()
    inside = _known_models(model, "", {model})
    name, inner = next(inside, ("", None))
    if inner is None or next(inside, None) is not None:
        return None, _Passing()
    return inner, _passing.of(model, name, lambda: _passes(model, inner)) or _Passing()


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
    """Check whether a class is one of torchvision or transformers, or derived from one."""
    return any(base.__module__.partition(".")[0] in ("torchvision", "transformers") for base in kind.__mro__)


class _Call(NamedTuple):
    """Call of the inner model, and how many operations ran before it, outside."""

    args: tuple[Any, ...]
    given: dict[str, Any]
    made: Any
    before: int


def _passes(model: nn.Module, inner: nn.Module) -> _Passing | None:
    """Run a model once, and look what its inner model is given and returns; None if it may run the next time."""
    calls: list[_Call] = []
    with own_modes(), torch.no_grad(), same_randomness(), evaluating(model):
        pixels, keyword = _blank(inner)
        outside = _Outside()
        with Attempt() as attempt, _told(inner, calls, outside), outside, outside.functions:
            output = model(pixels)
    if attempt.failed:
        return _Passing() if attempt.lasts else None
    if len(calls) != 1 or calls[0].before:
        return _Passing()
    call = calls[0]
    passed = {str(index): value for index, value in enumerate(call.args)} | call.given
    tensors = {name: value for name, value in passed.items() if isinstance(value, torch.Tensor)}
    on = (
        len(tensors) == 1
        and next(iter(tensors)) in ("0", keyword, "x", "pixel_values")
        and next(iter(tensors.values())) is pixels
    )
    same = output is call.made or (isinstance(output, torch.Tensor) and output is getattr(call.made, "logits", None))
    return _Passing(on, on and same and not outside.count)


def _blank(inner: nn.Module) -> tuple[torch.Tensor, str]:
    """Return pixels for a model, and the name of the parameter that takes them."""
    spec: InputSpec = FAMILIES[owner(inner)].input_spec(inner)
    like = next((each for each in inner.parameters() if each.is_floating_point()), torch.zeros(()))
    return torch.zeros(1, spec.channels, *spec.size, device=like.device, dtype=like.dtype), spec.keyword


@contextmanager
def _told(inner: nn.Module, calls: list[_Call], outside: _Outside) -> Iterator[None]:
    """Note each forward of a module with its arguments and output, while the block runs."""
    own, known = vars(inner).get("forward"), inner.forward

    def forward(*args: Any, **given: Any) -> Any:  # noqa: ANN401
        before = outside.count
        with outside.left():
            made = known(*args, **given)
        calls.append(_Call(args, given, made, before))
        return made

    vars(inner)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(inner)["forward"]
        else:
            vars(inner)["forward"] = own


class _Outside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count of the operations that run outside of the inner model."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self._inside = 0, False
        self.functions = _Functions(self)

    @contextmanager
    def left(self) -> Iterator[None]:
        """Do not count the operations of the block."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def tell(self, name: str) -> None:
        """Count an operation, unless it only reads what a tensor is, or marks a range for the profiler, as wrappers of PyTorch do."""
        self.count += not self._inside and name not in _FACTS and not name.startswith(_MARKS)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.tell(str(func))
        return func(*args, **(kwargs or {}))


_MARKS = "profiler.", "_record_function_"
_FACTS = frozenset({"__get__", "size", "dim", "is_floating_point", "numel", "stride", "__len__"})


class _Functions(TorchFunctionMode):
    """Python's calls of PyTorch's functions, of which some read values and are no operation."""

    def __init__(self, outside: _Outside) -> None:
        super().__init__()
        self._outside = outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self._outside.tell(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))
