"""Which module of a model is running: read off the Python stack, so nothing is put on the model and threads do not mix."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn
from torch.fx import GraphModule


class Owners:
    """The modules of one model.

    Attributes:
        names: Their dotted names.
        modules: All of them, in that order.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the modules once."""
        self.names = module_names(model)
        self.modules = list(self.names)

    def current(self) -> tuple[str, nn.Module] | None:
        """Dotted name and module of the innermost running method of the model; None if another model runs."""
        frame: FrameType | None = sys._getframe(3)  # behind the mode's own, whose locals take time to collect
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
    """The modules of a model with their names, as `named_modules` gives them; each capture asks, and this is several times as fast."""
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
    """The module that a line of traced code was written in; tracing, and `torch.export`, note it with each node."""
    result = "".join(module.code.splitlines()[line - 1 : line]).partition("=")[0].strip()
    node = next((node for node in module.graph.nodes if node.name == result), None)
    stack = node.meta.get("nn_module_stack") if node is not None else None
    return str(list(stack.values())[-1][0]) if stack else ""
