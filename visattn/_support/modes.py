"""Modes of PyTorch and of models while visattn computes, and random numbers that a dry run must not use up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn

from visattn._support.checkpointing import without_checkpoints
from visattn._support.checks import first_line
from visattn._support.parts import Parts, parts_of
from visattn.errors import ModelError

P = ParamSpec("P")
R = TypeVar("R")
_DEVICES = "cpu", "cuda", "mps", "xpu"


class _Autocast(NamedTuple):
    """Autocast that the caller has turned on for a kind of device."""

    device: str
    dtype: torch.dtype

    def switched(self, *, on: bool) -> torch.autocast:
        """Turn it on or off, without its cache: a weight that was cast in an earlier forward pass would be none of this one."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=on, cache_enabled=False)


_callers: ContextVar[tuple[_Autocast, ...]] = ContextVar("autocast of the caller", default=())


def callers_autocast(device: str) -> torch.dtype | None:
    """Return the type to which the caller lets a kind of device cast, such as bfloat16; None if autocast is off there."""
    return next((one.dtype for one in (*_autocast(), *_callers.get()) if one.device == device), None)


def _autocast() -> tuple[_Autocast, ...]:
    return tuple(_Autocast(device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device))


@contextmanager
def own_modes() -> Iterator[None]:
    """Compute in full precision and on tensors that autograd can use, whatever the modes of the caller.

    Inference mode and autocast are off inside the block. The model's own computation goes into `callers_modes`. Python's random numbers go
    on after the block as if it had drawn none: libraries that are imported inside draw some.

    Yields:
        Nothing.
    """
    active = _autocast()
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if active:
            stack.callback(_callers.reset, _callers.set(active))
        for one in active:
            stack.enter_context(one.switched(on=False))
        yield


@contextmanager
def callers_modes() -> Iterator[None]:
    """Run a model under the caller's autocast, inside of `own_modes`.

    Yields:
        Nothing.
    """
    with ExitStack() as stack:
        for one in _callers.get():
            stack.enter_context(one.switched(on=True))
        yield


def in_own_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run in `own_modes`."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with own_modes():
            return function(*args, **kwargs)

    return run


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
        # without an accelerator several times faster than `torch.manual_seed`, which formats a stack for each kind of them
        (torch.manual_seed if _has_accelerator() else torch.default_generator.manual_seed)(number % 2**64)
        yield


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


@contextmanager
def evaluating(model: nn.Module, *, frozen: bool = False) -> Iterator[None]:
    """Put a model into evaluation mode, and run it without activation checkpointing; the mode of each module is restored on exit.

    Args:
        model: The model.
        frozen: Whether to disable gradients of the parameters inside the block, so that no graph is kept for them.

    Yields:
        Nothing.

    Raises:
        ModelError: If the model cannot be put into evaluation mode, for example because it contains itself.
    """
    parts = parts_of(model)
    modes = [module.training for module in parts.modules]
    trained: list[nn.Parameter] = []
    try:
        if True in modes:
            _evaluate(model)
        if frozen:
            _freeze(parts, trained)
        with without_checkpoints(parts.modules):
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad = True
        for module, training in zip(parts.modules, modes, strict=True):
            if module.training is not training:  # setting an attribute of a module is slow
                module.training = training


def _freeze(parts: Parts, trained: list[nn.Parameter]) -> None:
    """Disable gradients of all parameters, and add those that had them to `trained`."""
    for parameter in parts.parameters():
        if parameter.requires_grad:
            try:
                _ = parameter._version
            except RuntimeError:  # those of inference mode have none; they are in no graph, and cannot be frozen outside of it
                continue
            parameter.requires_grad = False
            trained += (parameter,)


def _evaluate(model: nn.Module) -> None:
    try:
        model.eval()
    except Exception as error:  # a model may override `eval` or `train`
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(
            f"{type(model).__name__}: model.eval() fails: {what}. Call it yourself to debug it; no module may contain itself."
        ) from error
