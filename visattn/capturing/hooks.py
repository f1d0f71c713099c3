"""What is done around the calls of modules while something is watched.

The hooks are torch's global ones, so nothing hangs on a module: a model that is copied or saved meanwhile takes nothing along.
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
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

Before = Callable[[nn.Module, tuple[Any, ...]], None]
After = Callable[[nn.Module, tuple[Any, ...], Any], Any]


class ModuleCalls:
    """Calls of modules in one thread.

    Attributes:
        before: By `id` of a module: what is done when it is called.
        after: What is done when it has run; a result other than None takes the place of its output. A call that failed gives None.
    """

    def __init__(self) -> None:
        """Do nothing yet."""
        self.before: dict[int, list[Before]] = {}
        self.after: dict[int, list[After]] = {}
        self._thread = threading.get_ident()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the calls inside the `with`."""
        if "torch._dynamo" in sys.modules:  # compiled models run as they were written meanwhile
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
        """Whether this is another thread, or a backward pass that computes layers again."""
        return threading.get_ident() != self._thread or torch._C._current_graph_task_id() >= 0

    def _begun(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        acts = self.before.get(id(module))
        if acts is not None and not self.elsewhere():
            for act in acts:
                act(module, args)

    def _ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
        acts = self.after.get(id(module))
        if acts is None or self.elsewhere():
            return None
        replaced = None
        for act in acts:
            given = act(module, args, output if replaced is None else replaced)
            replaced = given if given is not None else replaced
        return replaced


def keywords() -> dict[str, Any]:
    """The keyword arguments of the call that a `before` is for, which torch does not give to global hooks."""
    frame: FrameType | None = sys._getframe()
    found: dict[str, Any] = {}
    while frame is not None and "kwargs" not in (found := frame.f_locals if frame.f_code.co_name == "inner" else {}):
        frame = frame.f_back
    return dict(found["kwargs"]) if frame is not None else {}


def running(module: nn.Module) -> int:
    """How many calls of a module are running, one in the other; those that failed are not among them."""
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back
    return count
