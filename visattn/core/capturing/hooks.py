"""Callbacks around the calls of modules, while a capture runs.

The hooks are PyTorch's global module hooks. Nothing is attached to a module, so a model that is copied or saved meanwhile stays
clean.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from visattn.core.capturing.placing.modes_around import hidden

Before = Callable[[nn.Module, tuple[Any, ...]], None]
After = Callable[[nn.Module, tuple[Any, ...], Any], Any]


class ModuleCalls:
    """Callbacks for the module calls of one thread.

    Attributes:
        before: Callbacks that run before a module's forward, by `id` of the module.
        after: Callbacks that run after it. A result other than None replaces the module's output. For a call that failed the output
            is None.
    """

    def __init__(self) -> None:
        """Start without callbacks, for the current thread."""
        self.before: dict[int, list[Before]] = {}
        self.after: dict[int, list[After]] = {}
        self._thread = threading.get_ident()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the callbacks of module calls inside the `with` block."""
        if "torch._dynamo" in sys.modules:  # compiled models run eagerly during a capture
            warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)
        handles = [
            register_module_forward_pre_hook(self._begun),
            register_module_forward_hook(self._ended, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def elsewhere(self) -> bool:
        """Check whether this is another thread, or a backward pass that recomputes layers (checkpointing)."""
        return threading.get_ident() != self._thread or torch._C._current_graph_task_id() >= 0

    def _begun(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Run the callbacks of a module that is about to run."""
        callbacks = self.before.get(id(module))
        if callbacks is not None and not self.elsewhere():
            with hidden():
                for callback in callbacks:
                    callback(module, args)

    def _ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
        """Run the callbacks of a module that has run; return the output that replaces its own, or None to leave it."""
        callbacks = self.after.get(id(module))
        if callbacks is None or self.elsewhere():
            return None
        replaced = None
        with hidden():
            for callback in callbacks:
                result = callback(module, args, output if replaced is None else replaced)
                replaced = result if result is not None else replaced
        return replaced


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
