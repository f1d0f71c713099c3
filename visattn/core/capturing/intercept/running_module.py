"""Running module of a model, found on the Python stack. Nothing is attached to the model, and threads do not interfere."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn
from torch.fx import GraphModule

from visattn._support.parts import Parts


class Owners:
    """Modules of a model.

    Attributes:
        names: Dotted name of each module.
        modules: All modules, in the same order.
    """

    def __init__(self, parts: Parts) -> None:
        """Store the modules of a model."""
        self.names, self.modules = dict(zip(parts.modules, parts.names, strict=True)), parts.modules

    def current(self) -> tuple[str, nn.Module] | None:
        """Return name and module of the innermost module of the model that has a running method; None if there is none.

        A method is recognized by its first argument, which is `self`, on the Python stack.
        """
        frame: FrameType | None = sys._getframe(3)  # skips the mode's own frames, whose locals take time to collect
        while frame is not None:
            code = frame.f_code
            if code.co_argcount:
                module = frame.f_locals.get(code.co_varnames[0])
                if isinstance(module, nn.Module) and module in self.names:
                    # without the prefixes of `torch.compile` and `DataParallel`
                    name = self.names[module].replace("_orig_mod.", "").removeprefix("module.")
                    path = _path_in_trace(module, frame.f_lineno) if isinstance(module, GraphModule) else ""
                    return ".".join(text for text in (name, path) if text), module
            frame = frame.f_back
        return None


def _path_in_trace(module: GraphModule, line: int) -> str:
    """Return the name of the original module behind a line of traced code; empty if it is unknown.

    Tracing and `torch.export` store it with the node of the graph whose result the line assigns.
    """
    code_line = "".join(module.code.splitlines()[line - 1 : line])
    variable = code_line.partition("=")[0].strip()
    node = next((node for node in module.graph.nodes if node.name == variable), None)
    stack = node.meta.get("nn_module_stack") if node is not None else None
    if not stack:
        return ""
    innermost_name, *_ = list(stack.values())[-1]
    return str(innermost_name)
