"""Memory of what was found out about models."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from visattn._support.sampled_weights import sampled_weights

T = TypeVar("T")
_PLAIN = frozenset({bool, int, float, str, type(None)})
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every module, such as its mode


class _Memory(Generic[T]):
    """Results of questions about models; they are dropped when what they depend on has changed."""

    def __init__(self, depends_on: Callable[[nn.Module], Iterator[object]]) -> None:
        """Begin with no results."""
        self._depends_on = depends_on
        self._known: WeakKeyDictionary[nn.Module, tuple[object, dict[Hashable, T]]] = WeakKeyDictionary()

    def of(self, model: nn.Module, about: Hashable, find: Callable[[], T]) -> T:
        """Return the result of `find` for a model and a question about it; it is called only if the result is not known.

        None, which says that there was no answer, is not kept: what prevented it may be gone the next time.
        """
        results, question = self._results(model), (about, _surroundings())
        if question in results:
            return results[question]
        result = find()
        if result is not None:
            results[question] = result
        return result

    def known(self, model: nn.Module, about: Hashable) -> T | None:
        """Return the result for a model and a question about it if it is known."""
        return self._results(model).get((about, _surroundings()))

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


def _surroundings() -> Hashable:
    """Return what of PyTorch's global state may decide whether and how a model runs."""
    return torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()


def _weights(model: nn.Module) -> Iterator[object]:
    """Yield what tells that the model was built otherwise, or that weights were replaced or written, also through `.data`."""
    yield from _structure(model, but=(list, set, dict))  # a model may fill these in its forward pass
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        yield name, id(tensor), tensor.dtype, 0 if tensor.is_inference() else tensor._version
    yield from chain.from_iterable(sampled_weights(model).values())


def _structure(model: nn.Module, but: tuple[type, ...] = ()) -> Iterator[object]:
    """Yield what decides how a forward pass runs: classes, functions, settings, hooks and shapes of all modules."""
    for name, module in model.named_modules():
        yield name
        yield type(module)
        yield _Same(getattr(type(module), "forward", None))
        yield tuple(module._modules.keys())
        for key, value in vars(module).items():
            if key not in _OF_MODULES and not isinstance(value, but):
                yield key
                yield _setting(value)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            yield tuple(map(_Same, hooks.values()))
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                yield None if tensor is None else tensor.shape


class _Same:
    """One object as long as it lives: another that takes its place in memory is not equal."""

    def __init__(self, value: Any) -> None:  # noqa: ANN401
        try:
            self._value: Callable[[], Any] = ref(value)
        except TypeError:  # such as numbers, and types of data
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value() is other._value() is not None


def _setting(value: Any) -> object:  # noqa: ANN401 - any attribute of a module
    """Return what tells whether an attribute was changed; of an object that is no function, its own plain attributes."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple, set)):
        return type(value), tuple(part if type(part) in _PLAIN else _Same(part) for part in value)
    if isinstance(value, dict):
        return dict, tuple((key, part if type(part) in _PLAIN else _Same(part)) for key, part in value.items())
    if isinstance(value, Tensor):
        return value.shape
    if callable(value):
        return _Same(value)
    attributes = getattr(value, "__dict__", {})
    return type(value), tuple((key, part) for key, part in attributes.items() if type(part) in _PLAIN)
