"""How attention modules show their gates: to an open capture, and at no cost to anybody else.

A leaf, so that modules need not know captures, nor captures modules.
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
    """Show a gate to whoever listens.

    Args:
        module: Whose gate it is.
        role: What the gate's axes are; see `visattn.records.FeatureRecord`. Axes that the gate is broadcast over may have length 1.
        gate: The gate, or a function that makes it, which is called only if somebody listens.
        features: Of a gate of places the features that lie at the same places, by default the gate itself; of a transform those that
            are sampled.
    """
    if not torch.compiler.is_compiling() and _listeners:  # compiled code holds nothing of this
        value = gate() if callable(gate) else gate
        for listener in _listeners:
            listener(module, role, value, features)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Show all gates to `listener` inside the `with`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
