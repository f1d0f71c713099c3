"""Which module of a model is running: read off the Python stack, so nothing is put on the model and threads do not mix."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn


class Owners:
    """The modules of one model by identity."""

    def __init__(self, model: nn.Module) -> None:
        """Name the modules once."""
        self._names = {id(module): name for name, module in model.named_modules(remove_duplicate=True)}

    def current(self) -> tuple[str, nn.Module] | None:
        """Dotted name and module of the innermost running method of the model; None if another model runs."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_argcount:
                first = frame.f_locals.get(code.co_varnames[0])
                if isinstance(first, nn.Module) and id(first) in self._names:
                    return self._names[id(first)].replace("_orig_mod.", "").removeprefix("module."), first
            frame = frame.f_back
        return None
