"""Running module of a model, found on the Python stack. Nothing is attached to the model, and threads do not interfere."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn
from torch.fx import GraphModule


class Owners:
    """Modules of a model.

    Attributes:
        names: Dotted name of each module.
        modules: All modules, in the same order.
    """

    def __init__(self, model: nn.Module) -> None:
        """Collect the modules of a model."""
        self.names = module_names(model)
        self.modules = list(self.names)

    def current(self) -> tuple[str, nn.Module] | None:
        """Return the innermost module of the model that has a running method, with its dotted name; None if there is none."""
        frame: FrameType | None = sys._getframe(3)  # skips the mode's own frames, whose locals take time to collect
        while frame is not None:
            code = frame.f_code
            if code.co_argcount:
                first = frame.f_locals.get(code.co_varnames[0])
                if isinstance(first, nn.Module) and first in self.names:
                    module = first
                    name = self.names[module].replace("_orig_mod.", "").removeprefix("module.")
                    path = _path_in_trace(module, frame.f_lineno) if isinstance(module, GraphModule) else ""
                    return ".".join(part for part in (name, path) if part), module
            frame = frame.f_back
        return None


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules of a model with their names, as `named_modules` does, but several times faster: each capture needs it."""
    found: dict[nn.Module, str] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module not in found:
            found[module] = name
            if parts := module._modules:
                start = f"{name}." if name else ""
                waiting += [(start + key, part) for key, part in reversed(parts.items()) if part is not None]
    return found


def _path_in_trace(module: GraphModule, line: int) -> str:
    """Return the original module of a line of traced code, which tracing and `torch.export` store with each node."""
    result = "".join(module.code.splitlines()[line - 1 : line]).partition("=")[0].strip()
    node = next((node for node in module.graph.nodes if node.name == result), None)
    stack = node.meta.get("nn_module_stack") if node is not None else None
    return str(list(stack.values())[-1][0]) if stack else ""
