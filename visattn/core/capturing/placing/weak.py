"""References to the tensors of a model that neither keep them alive nor keep the model from exchanging what two tensors hold.

`torch.utils.swap_tensors` refuses a tensor that has weak references, because they would then name another content. Those of a capture do
not count: it is told of the exchange.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Weak(weakref.ref[Tensor]):
    """Weak reference to a tensor during a capture."""

    __slots__ = ()


class Home:
    """Place in a model where a tensor is kept.

    Attributes:
        module: Weak reference to its module.
        kind: Attribute of the module that holds such tensors, as `_parameters`; empty for the module's own attributes.
        name: Name there.
    """

    __slots__ = ("kind", "module", "name")

    def __init__(self, module: nn.Module, kind: str, name: str) -> None:
        """Remember a place."""
        self.module, self.kind, self.name = weakref.ref(module), kind, name

    def holds(self, tensor: Tensor) -> bool:
        """Check whether a tensor is kept there now."""
        return self.tensor() is tensor

    def tensor(self) -> Tensor | None:
        """Return the tensor that is kept there now; None if there is none."""
        module = self.module()
        if module is None:
            return None
        attributes = module.__dict__
        tensor: Tensor | None = (attributes[self.kind] if self.kind else attributes).get(self.name)
        return tensor


Told = Callable[[Tensor], None]  # takes a tensor whose content may be exchanged right afterward


class _Weakref:
    """Stand-in for the module `weakref` where `torch.utils.swap_tensors` asks it."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(weakref, name)

    def getweakrefs(self, value: Any) -> list[Any]:  # noqa: ANN401
        """Return the weak references to a tensor, without those of captures, and tell the captures."""
        for tell_capture in list(_listening):
            tell_capture(value)
        return [reference for reference in weakref.getweakrefs(value) if type(reference) is not Weak]


_lock = threading.Lock()
_listening: list[Told] = []


@contextmanager
def exchanging(told: Told) -> Iterator[None]:
    """Let the model exchange what tensors hold (`torch.utils.swap_tensors`) inside the `with` block, and call `told` with each.

    Captures in several threads share the switch: the last one that ends restores PyTorch.
    """
    with _lock:
        _listening.append(told)
        setattr(torch.utils, "weakref", _Weakref())  # noqa: B010 - missing from its stubs
    try:
        yield
    finally:
        with _lock:
            _listening.remove(told)
            if not _listening:
                setattr(torch.utils, "weakref", weakref)  # noqa: B010
