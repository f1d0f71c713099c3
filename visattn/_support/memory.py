"""Memory of what was found out about models."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

T = TypeVar("T")
_PLAIN = frozenset({bool, int, float, str, type(None)})
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every module, such as its mode and its hooks


class _Memory(Generic[T]):
    """Results of questions about models; they are dropped when what they depend on has changed."""

    def __init__(self, depends_on: Callable[[nn.Module], Iterator[Hashable]]) -> None:
        """Begin with no results."""
        self._depends_on = depends_on
        self._known: WeakKeyDictionary[nn.Module, tuple[Hashable, dict[Hashable, T]]] = WeakKeyDictionary()

    def of(self, model: nn.Module, about: Hashable, find: Callable[[], T]) -> T:
        """Return the result of `find` for a model and a question about it; it is called only if the result is not known."""
        results = self._results(model)
        if about not in results:
            results[about] = find()
        return results[about]

    def known(self, model: nn.Module, about: Hashable) -> T | None:
        """Return the result for a model and a question about it if it is known."""
        return self._results(model).get(about)

    def _results(self, model: nn.Module) -> dict[Hashable, T]:
        state = tuple(self._depends_on(model))
        before, results = self._known.get(model, (None, {}))
        if before != state:
            results = {}
            self._known[model] = state, results
        return results


class OfStructure(_Memory[T]):
    """Results that depend on how a model is built, and not on the values of its weights."""

    def __init__(self) -> None:
        """Begin with no results."""
        super().__init__(_structure)


class OfWeights(_Memory[T]):
    """Results that depend on the weights of a model."""

    def __init__(self) -> None:
        """Begin with no results."""
        super().__init__(_weights)


def _weights(model: nn.Module) -> Iterator[Hashable]:
    """Yield what tells that weights were replaced or written."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        yield name, id(tensor), tensor.dtype, 0 if tensor.is_inference() else tensor._version


def _structure(model: nn.Module) -> Iterator[Hashable]:
    """Yield what decides how a forward pass runs: classes, settings and shapes of all modules."""
    for name, module in model.named_modules():
        yield name
        yield f"{type(module).__module__}.{type(module).__qualname__}"
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
