"""Memory of what was found out about models."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from visattn._support.parts import parts_of
from visattn._support.sampled_weights import sampled_weights

T = TypeVar("T")
_PLAIN = frozenset({bool, int, float, str, type(None)})
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every module, such as its mode


class _Memory(Generic[T]):
    """Results of questions about models; they are dropped when what they depend on has changed."""

    def __init__(self, state_of: Callable[[nn.Module], _Structure | _Weights]) -> None:
        """Begin with no results."""
        self._state_of = state_of
        self._known: WeakKeyDictionary[nn.Module, tuple[_Structure | _Weights, dict[Hashable, T]]] = WeakKeyDictionary()

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
        known = self._known.get(model)
        if known is None or not known[0].holds():
            known = self._known[model] = self._state_of(model), {}
        return known[1]


class OfStructure(_Memory[T]):
    """Results that depend on how a model is built, and not on the values of its weights."""

    def __init__(self) -> None:
        """Begin with no results."""
        super().__init__(_Structure)


class OfWeights(_Memory[T]):
    """Results that depend on the weights of a model."""

    def __init__(self) -> None:
        """Begin with no results."""
        super().__init__(_Weights)


def _surroundings() -> Hashable:
    """Return what of PyTorch's global state may decide whether and how a model runs."""
    return torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()


class _Weights:
    """What tells that a model was built otherwise, or that weights were replaced or written, also through `.data`."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._structure = ref(model), _Structure(model, but=(list, set, dict))  # a model may fill these when it runs
        self._values = self._of(model)

    def holds(self) -> bool:
        """Check whether nothing has changed."""
        model = self._model()
        return model is not None and self._structure.holds() and self._values == self._of(model)

    @staticmethod
    def _of(model: nn.Module) -> list[object]:
        named = chain(model.named_parameters(), model.named_buffers())
        tensors = [(name, id(tensor), tensor.dtype, 0 if tensor.is_inference() else tensor._version) for name, tensor in named]
        return [*tensors, *sampled_weights(model).values()]


class _Structure:
    """What decides how a forward pass of a model runs: classes, functions, settings, hooks and shapes of all modules."""

    def __init__(self, model: nn.Module, but: tuple[type, ...] = ()) -> None:
        """Note all of it; attributes of the classes `but` do not matter."""
        self._model = ref(model)
        parts = parts_of(model)
        self._modules = [_Settings(module, but) for module in parts.modules]
        self._build = parts.fact(_Structure, lambda _: object())  # another one if the model is built otherwise

    def holds(self) -> bool:
        """Check whether nothing has changed."""
        model = self._model()
        if model is None or parts_of(model).fact(_Structure, lambda _: object()) is not self._build:
            return False
        return all(map(_Settings.hold, self._modules))


class _Settings:
    """Settings, hooks and shapes of one module. Most of them are compared by operators alone, since there are thousands in a model."""

    def __init__(self, module: nn.Module, but: tuple[type, ...]) -> None:
        """Note them."""
        self._module, self._forward, self._but = ref(module), _same(getattr(type(module), "forward", None)), but
        own = {key: value for key, value in vars(module).items() if key not in _OF_MODULES and not isinstance(value, but)}
        self._plain = {key: value for key, value in own.items() if _is_plain(value)}
        self._others = {key: _setting(value) for key, value in own.items() if key not in self._plain}
        self._count, self._hooks = len(own), _hooks(module)
        self._shapes = [
            {name: None if tensor is None else tensor.shape for name, tensor in tensors.items()}
            for tensors in (module._parameters, module._buffers)
        ]

    def hold(self) -> bool:
        """Check whether the module still has them."""
        module = self._module()
        try:
            if module is None or type(module).forward is not self._forward():
                return False
        except AttributeError:  # TorchScript runs it
            return False
        plain, others, count = self._plain, self._others, 0
        attributes = module.__dict__
        for key in attributes:
            now = attributes[key]
            if key in plain:
                if now is not plain[key] and (type(now) is not type(plain[key]) or now != plain[key]):
                    return False
                count += 1
            elif key in others:
                if _setting(now) != others[key]:
                    return False
                count += 1
            elif key not in _OF_MODULES and not isinstance(now, self._but):
                return False
        for tensors, shapes in zip((attributes["_parameters"], attributes["_buffers"]), self._shapes, strict=True):
            if [*tensors] != [*shapes]:
                return False
            for name in tensors:
                tensor = tensors[name]
                if (None if tensor is None else tensor.shape) != shapes[name]:
                    return False
        has_hooks = module._forward_hooks or module._forward_pre_hooks or self._hooks
        return count == self._count and (not has_hooks or _hooks(module) == self._hooks)


def _hooks(module: nn.Module) -> list[_Same]:
    return [_Same(hook) for hooks in (module._forward_pre_hooks, module._forward_hooks) for hook in hooks.values()]


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(part) in _PLAIN for part in value))


def _same(value: Any) -> Callable[[], Any]:  # noqa: ANN401
    """Return a function that returns a value as long as it lives."""
    try:
        return ref(value)
    except TypeError:  # such as numbers, and types of data
        return lambda: value


class _Same:
    """One object as long as it lives: another that takes its place in memory is not equal."""

    def __init__(self, value: Any) -> None:  # noqa: ANN401
        self._value = _same(value)

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
