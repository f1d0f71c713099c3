"""Callbacks around the calls of modules, while a capture runs.

PyTorch's global hooks see every module, and slow every module down. So a global hook only waits for the beginning of a forward pass, and
hooks are attached to those modules that have callbacks until it ends. A model that is copied or saved between forward passes is clean.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._script import RecursiveScriptModule
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from visattn.core.capturing.placing.modes_around import hidden

Before = Callable[[nn.Module, tuple[Any, ...]], None]
After = Callable[[nn.Module, tuple[Any, ...], Any], Any]


class ModuleCalls:
    """Callbacks for the module calls of one thread.

    Attributes:
        before: Callbacks that run before a module's forward.
        after: Callbacks that run after it. A result other than None replaces the module's output. For a call that failed the output
            is None.
        outside: Callbacks that run before a module's forward while no forward pass of the whole model runs.
    """

    def __init__(self) -> None:
        """Start without callbacks, for the current thread."""
        self.before: dict[nn.Module, list[Before]] = {}
        self.after: dict[nn.Module, list[After]] = {}
        self.outside: dict[nn.Module, list[Before]] = {}
        self._thread = threading.get_ident()
        self._befores: list[RemovableHandle] = []
        self._afters: list[RemovableHandle] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the callbacks of module calls inside the `with` block."""
        if "torch._dynamo" in sys.modules:  # compiled models run eagerly during a capture
            warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)
        self.wait()
        try:
            yield
        finally:
            self._remove(self._befores, self._afters)

    def wait(self, *, after_failure: bool = False) -> None:
        """Wait for a module with a callback, wherever it is called: no forward pass is running, or only that of a part.

        PyTorch is still reading the hooks of a model that has failed, so those that run after modules stay.
        """
        self._remove(self._befores, [] if after_failure else self._afters)
        self._befores.append(register_module_forward_pre_hook(self._begun))

    def follow_part(self) -> None:
        """Also hear the ends of modules, wherever they are called: a part of the model has begun a forward pass."""
        self.wait()
        self._afters.append(register_module_forward_hook(self._ended, always_call=True))

    def follow(self) -> None:
        """Hear the modules that have callbacks until `wait`: the whole model has begun a forward pass."""
        if RecursiveScriptModule in map(type, (*self.before, *self.after)):
            self.follow_part()  # these take no hooks
            return
        self._remove(self._befores, self._afters)
        for module in self.before:
            self._befores.append(module.register_forward_pre_hook(_Hook(self._begun), prepend=True))
        for module in self.after:
            self._afters.append(module.register_forward_hook(_Hook(self._ended), prepend=True, always_call=True))

    @staticmethod
    def _remove(*lists: list[RemovableHandle]) -> None:
        for handles in lists:
            while handles:
                handles.pop().remove()

    def elsewhere(self) -> bool:
        """Check whether this is another thread, or a backward pass that recomputes layers (checkpointing)."""
        return threading.get_ident() != self._thread or torch._C._current_graph_task_id() >= 0

    def _begun(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Run the callbacks of a module that is about to run."""
        callbacks = (*self.outside.get(module, ()), *self.before.get(module, ()))
        if callbacks and not self.elsewhere():
            with hidden():
                for callback in callbacks:
                    callback(module, args)

    def _ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
        """Run the callbacks of a module that has run; return the output that replaces its own, or None to leave it."""
        callbacks = self.after.get(module)
        if callbacks is None or self.elsewhere():
            return None
        replaced = None
        with hidden():
            for callback in callbacks:
                result = callback(module, args, output if replaced is None else replaced)
                replaced = result if result is not None else replaced
        return replaced


class _Hook(partial[Any]):
    """Hook on a module for the time of a forward pass. A copy of it, in a copy of the module, does nothing."""

    def __reduce__(self) -> tuple[type[_Hook], tuple[Callable[..., None]]]:
        return _Hook, (_nothing,)


def _nothing(*_: object) -> None:
    """Do nothing, instead of a hook that was copied."""


def keywords() -> dict[str, Any]:
    """Return the keyword arguments of the call that a `before` callback runs for; torch does not pass them to global hooks."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "inner":  # torch's function that runs hooks and forward
            variables = frame.f_locals
            if "kwargs" in variables:
                return dict(variables["kwargs"])
        frame = frame.f_back
    return {}


def with_first(given: Any, output: Tensor) -> Any:  # noqa: ANN401
    """Return a module's output with its first tensor replaced."""
    if isinstance(given, Tensor):
        return output
    parts = output, *given[1:]
    return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)


def running(module: nn.Module) -> int:
    """Count the nested calls of a module that are running now, from the Python stack; calls that failed do not count."""
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back
    return count
