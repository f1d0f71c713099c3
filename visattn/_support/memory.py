"""Memory of what was found out about models."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

T = TypeVar("T")
_PLAIN = frozenset({bool, int, float, str, type(None)})
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every module, such as its mode and its hooks


class OfStructure(Generic[T]):
    """Results that depend on how a model is built, and not on the values of its weights; a change of the model drops them."""

    def __init__(self) -> None:
        """Begin with no results."""
        self._known: WeakKeyDictionary[nn.Module, tuple[Hashable, dict[Hashable, T]]] = WeakKeyDictionary()

    def of(self, model: nn.Module, about: Hashable, find: Callable[[], T]) -> T:
        """Return the result of `find` for a model and a question about it; call it only if it was not called before for this structure."""
        structure = tuple(_structure(model))
        before, results = self._known.get(model, (None, {}))
        if before != structure:
            results = {}
            self._known[model] = structure, results
        if about not in results:
            results[about] = find()
        return results[about]


def _structure(model: nn.Module) -> Iterator[Hashable]:
    """Yield what decides how a forward pass runs: classes, settings and shapes of all modules."""
    for name, module in model.named_modules():
        yield name
        yield type(module)
        for key, value in vars(module).items():
            if key in _OF_MODULES:
                continue
            kind = type(value)
            if kind in _PLAIN or (kind is tuple and all(type(part) in _PLAIN for part in value)):
                yield key
                yield value
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                yield None if tensor is None else tensor.shape
