"""Activation checkpointing, which computes a part of a model twice to save memory, turned off while visattn runs the model.

It changes no value, but hides modules: timm's calls the parts of a stage instead of the stage, which then has no output to read, and the
reentrant one runs where autograd records no graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointFunction

_FLAGS = "grad_checkpointing", "gradient_checkpointing"  # attributes of timm's modules and of those of transformers
_lock = threading.Lock()
_threads: list[int] = []  # those that run without, once per open block


@contextmanager
def without_checkpoints(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run a model with these modules without activation checkpointing inside the block, in this thread.

    Yields:
        Nothing.
    """
    flags = [(module, name) for module in modules for name in _FLAGS if name in module.__dict__ and module.__dict__[name] is True]
    with _lock:
        _threads.append(threading.get_ident())
        CheckpointFunction.apply = _applied
    try:
        for module, name in flags:
            setattr(module, name, False)
        yield
    finally:
        for module, name in flags:
            setattr(module, name, True)
        with _lock:
            _threads.remove(threading.get_ident())
            if not _threads:
                del CheckpointFunction.apply


def _applied(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:  # noqa: ANN401 - as autograd's function
    """Run a checkpointed function: directly in a thread that runs without checkpoints, else as PyTorch does."""
    if threading.get_ident() in _threads:
        return function(*args)
    return super(CheckpointFunction, CheckpointFunction).apply(function, preserve, *args)
