"""Tensors that the code of a model keeps between forward passes: globals, containers in them, and results of `functools.lru_cache`.

A tensor that existed before a forward pass began does not depend on its image.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn

_CACHE = type(functools.lru_cache(len))
_MOST = 1000  # entries of a container that is searched
_WITHOUT = frozenset(
    {str, int, float, bool, type(None), type, FunctionType}
)  # types that hold no tensors; most entries have them
_keepers_of: dict[object, list[Any]] = {}  # caches and containers by class or Python file (a module object)


def kept_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors that are kept by the classes of these modules and by the Python files that define them.

    These are class attributes and global variables, also in lists and dictionaries, and results that `functools.lru_cache` stores.
    """
    module_classes = dict.fromkeys(map(type, modules))
    classes = dict.fromkeys(
        base for module_class in module_classes for base in module_class.__mro__ if not base.__module__.startswith("torch.")
    )
    files = dict.fromkeys(filter(None, (sys.modules.get(owner.__module__) for owner in classes)))
    owners = (*classes, *files)
    keepers = {id(keeper): keeper for owner in owners for keeper in _keepers(owner)}
    direct = [value for owner in owners for value in list(vars(owner).values()) if isinstance(value, Tensor)]
    nested = [tensor for keeper in keepers.values() for tensor in tensors_within(keeper)]
    return [*direct, *nested]


def tensors_within(value: Any, depth: int = 3) -> list[Tensor]:  # noqa: ANN401
    """Return the tensors in a value such as a list, a dictionary or an `lru_cache`, down to `depth` nested ones.

    Containers with more than a thousand entries are not searched.
    """
    if isinstance(value, Tensor):
        return [value]
    if not depth:
        return []
    if type(value) is _CACHE:
        stored = [item for item in gc.get_referents(value) if type(item) is not FunctionType]
        return [tensor for item in stored for tensor in tensors_within(item, depth - 1)]
    if type(value) is dict or isinstance(value, Mapping):  # the second test takes longer
        value = list(value.values()) if len(value) <= _MOST else []
    if isinstance(value, (tuple, list)) and len(value) <= _MOST:
        return [tensor for item in value if type(item) not in _WITHOUT for tensor in tensors_within(item, depth - 1)]
    return []


def _keepers(owner: Any) -> list[Any]:  # noqa: ANN401
    """Return the dictionaries, lists and caches among the variables of a class or a Python file; each owner is searched once."""
    if owner not in _keepers_of:
        _keepers_of[owner] = [keeper for value in list(vars(owner).values()) for keeper in _keepers_in(value)]
    return _keepers_of[owner]


def _keepers_in(value: Any, depth: int = 3) -> list[Any]:  # noqa: ANN401
    """Return a value that may keep tensors between calls: a dictionary, a list or an `lru_cache`.

    For a function, return those that its decorators hold in its closure.
    """
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if type(value) in (dict, list, _CACHE):
        return [value]
    if type(value) is not FunctionType or not depth:
        return []
    cells = value.__closure__ or ()
    return [keeper for cell in cells if _is_filled(cell) for keeper in _keepers_in(cell.cell_contents, depth - 1)]


def _is_filled(cell: Any) -> bool:  # noqa: ANN401
    """Check whether a variable in the closure of a function has a value."""
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that has no value yet
        return False
