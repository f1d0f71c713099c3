"""Channel through which attention modules publish their gates to an open capture; without a capture it costs nothing.

It stands apart so that `nn` and `capturing` need not import each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from visattn._support.types import Role

Listener = Callable[[nn.Module, Role, Tensor, Tensor | None], None]  # the arguments of `publish`

_listeners: list[Listener] = []


def publish(module: nn.Module, role: Role, gate: Tensor | Callable[[], Tensor], features: Tensor | None = None) -> None:
    """Pass a gate to the listeners.

    Args:
        module: Module that computes the gate.
        role: Role of the gate, which defines its axes; see `visattn.records.FeatureRecord`. Broadcast axes may have length 1.
        gate: The gate, or a function that computes it; the function is called only if there is a listener.
        features: For a spatial gate, features at the same positions; by default the gate itself. For a transform, the features that it
            samples.
    """
    if not torch.compiler.is_compiling() and _listeners:  # compiled code publishes nothing
        value = gate() if callable(gate) else gate
        for listener in _listeners:
            listener(module, role, value, features)


def is_heard() -> bool:
    """Check whether there is a listener."""
    return bool(_listeners)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Register `listener` for all gates inside the `with` block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
