"""Which module of a model is running: read off the Python stack, so nothing is put on the model and threads do not mix."""

from __future__ import annotations

import sys
from functools import cached_property
from types import FrameType

from torch import nn
from torch.fx import GraphModule


class Owners:
    """The modules of one model by identity.

    Attributes:
        modules: All of them.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the modules once; their names wait until somebody asks."""
        found, waiting = {model: None}, [model]
        while waiting:
            if parts := waiting.pop()._modules:
                new = [part for part in parts.values() if part is not None and part not in found]
                found.update(dict.fromkeys(new))
                waiting += new
        self.modules, self._model = list(found), model

    @cached_property
    def _named(self) -> dict[int, tuple[str, nn.Module]]:
        return {id(module): (name, module) for name, module in self._model.named_modules()}

    def current(self) -> tuple[str, nn.Module] | None:
        """Dotted name and module of the innermost running method of the model; None if another model runs."""
        frame: FrameType | None = sys._getframe(3)  # behind the mode's own, whose locals take time to collect
        while frame is not None:
            code = frame.f_code
            if code.co_argcount:
                first = frame.f_locals.get(code.co_varnames[0])
                known = self._named.get(id(first))
                if known is not None:
                    name, module = known[0].replace("_orig_mod.", "").removeprefix("module."), known[1]
                    path = _path_in_trace(module, frame.f_lineno) if isinstance(module, GraphModule) else ""
                    return ".".join(part for part in (name, path) if part), module
            frame = frame.f_back
        return None


def _path_in_trace(module: GraphModule, line: int) -> str:
    """The module that a line of traced code was written in; tracing, and `torch.export`, note it with each node."""
    result = "".join(module.code.splitlines()[line - 1 : line]).partition("=")[0].strip()
    node = next((node for node in module.graph.nodes if node.name == result), None)
    stack = node.meta.get("nn_module_stack") if node is not None else None
    return str(list(stack.values())[-1][0]) if stack else ""
