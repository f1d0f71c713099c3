# mypy: disable-error-code="no-untyped-call"
"""Modes: changes that programs make to a model before a call, or around it."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed, nn

from tests.contexts.models import Around, lightning

Change = Callable[[nn.Module], nn.Module]


class Mode(NamedTuple):
    """Something that a program does.

    Attributes:
        change: What it does to a model; raises `NotHere` where that cannot be done.
        around: What it does around the call.
        neutral: Whether the model computes the same as before.
        said: A word that the caption must have if the map differs from the plain one.
        answered: Whether an answer is expected; a scripted model cannot be looked into.
    """

    change: Change = lambda model: model
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    neutral: bool = True
    said: str = ""
    answered: bool = True


class NotHere(Exception):
    """The mode cannot be had for this model."""


def checkpointing(model: nn.Module) -> nn.Module:
    """Turn on activation checkpointing, as timm and transformers offer it."""
    inner: Any = getattr(model, "module", None) or getattr(model, "model", None) or model
    for name in ("set_grad_checkpointing", "gradient_checkpointing_enable"):
        if hasattr(inner, name):
            try:
                getattr(inner, name)()
            except (ValueError, AssertionError) as error:
                raise NotHere(str(error)) from error
            return model.train().eval()
    raise NotHere("no activation checkpointing")


def pickled(model: nn.Module) -> nn.Module:
    """Save and load a model as a whole."""
    stream = io.BytesIO()
    try:
        torch.save(model, stream)
    except Exception as error:  # a class inside a function
        raise NotHere(str(error)) from error
    stream.seek(0)
    return torch.load(stream, weights_only=False)  # type: ignore[no-any-return]


def round_trip(model: nn.Module) -> nn.Module:
    """Save the weights, change them, and load them again."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.load_state_dict(state)
    return model


def distributed_one(model: nn.Module) -> nn.Module:
    """Wrap a model for distributed training, in a group of one process."""
    if not distributed.is_initialized():
        place = Path(tempfile.mkdtemp()) / "store"
        distributed.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model)


def compiled(model: nn.Module) -> nn.Module:
    """Compile a model, without a C++ compiler."""
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def scripted(model: nn.Module) -> nn.Module:
    """Trace a model into TorchScript."""
    try:
        with torch.no_grad():
            return torch.jit.trace(model, torch.zeros(1, 3, 64, 64), check_trace=False, strict=False)  # type: ignore[no-any-return]
    except Exception as error:
        raise NotHere(str(error)) from error


def still(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


MODES: dict[str, Mode] = {
    "plain": Mode(),
    "no_grad": Mode(around=torch.no_grad),
    "set_grad_enabled(False)": Mode(around=partial(torch.set_grad_enabled, False)),
    "inference_mode": Mode(around=torch.inference_mode),
    "autocast bfloat16": Mode(around=partial(torch.autocast, "cpu", torch.bfloat16), neutral=False, said="bfloat16"),
    "autocast float16": Mode(around=partial(torch.autocast, "cpu", torch.float16), neutral=False, said="float16"),
    "autocast off": Mode(around=partial(torch.autocast, "cpu", torch.bfloat16, enabled=False)),
    "checkpointing": Mode(change=checkpointing),
    "training mode": Mode(change=lambda model: model.train(), neutral=False, said="training mode"),
    "frozen": Mode(change=still),
    "deepcopy": Mode(change=copy.deepcopy),
    "pickle": Mode(change=pickled),
    "state_dict": Mode(change=round_trip),
    "averaged": Mode(change=torch.optim.swa_utils.AveragedModel),
    "wrapped": Mode(change=Around),
    "DataParallel": Mode(change=nn.DataParallel),
    "DDP": Mode(change=distributed_one),
    "Lightning": Mode(change=lightning),
    "compiled": Mode(change=compiled, neutral=False, said="compile"),
    "scripted": Mode(change=scripted, neutral=False, answered=False),
}


def both(first: str, second: str) -> Mode:
    """Return two modes in one: the first is done first, and lies outside."""
    one, other = MODES[first], MODES[second]
    return Mode(
        change=lambda model: other.change(one.change(model)),
        around=lambda: _Both(one.around(), other.around()),
        neutral=one.neutral and other.neutral,
        said=f"{one.said}|{other.said}",
        answered=one.answered and other.answered,
    )


class _Both(AbstractContextManager[None]):
    def __init__(self, one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> None:
        self.one, self.other = one, other

    def __enter__(self) -> None:
        self.one.__enter__()
        self.other.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.other.__exit__(*error)
        self.one.__exit__(*error)


def mode_of(name: str) -> Mode:
    """Return a mode by its name, or two by `FIRST + SECOND`."""
    first, _, second = name.partition(" + ")
    return both(first, second) if second else MODES[first]
