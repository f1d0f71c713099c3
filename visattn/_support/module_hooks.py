"""Hooks on all parts of a model, for as long as a block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Before = Callable[[str, tuple[Any, ...], Mapping[str, Any]], None]  # name of the module, and what it is given
After = Callable[
    [str, nn.Module, tuple[Any, ...], Any], None
]  # name of the module, the module, what it was given, and its output


@contextmanager
def module_hooks(model: nn.Module, *, after: After, before: Before | None = None) -> Iterator[None]:
    """Call functions before and after each call of a part of the model; parts that TorchScript runs take no hooks.

    Yields:
        Nothing.
    """
    handles = []

    def hang(name: str, part: nn.Module) -> None:
        if before is not None:
            handles.append(part.register_forward_pre_hook(lambda _, args, given: before(name, args, given), with_kwargs=True))
        handles.append(part.register_forward_hook(lambda _, args, output: after(name, part, args, output)))

    try:
        for name, part in model.named_modules():
            if name and not isinstance(part, torch.jit.ScriptModule):
                hang(name, part)
        yield
    finally:
        for handle in handles:
            handle.remove()
