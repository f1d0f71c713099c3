"""Tensors that the code of a model keeps between forward passes: its globals, containers in them, and results of `functools.lru_cache`.

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
_keeping: dict[object, list[Any]] = {}  # caches and containers by class or module of Python


def kept_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors that are kept by the classes of these modules and by the files that define them."""
    own = dict.fromkeys(map(type, modules))
    kinds = dict.fromkeys(kind for one in own for kind in one.__mro__ if not kind.__module__.startswith("torch."))
    files = dict.fromkeys(filter(None, (sys.modules.get(kind.__module__) for kind in kinds)))
    places = (*kinds, *files)
    keepers = {id(keeper): keeper for place in places for keeper in _keepers(place)}
    own_names = [value for place in places for value in list(vars(place).values()) if isinstance(value, Tensor)]
    return [*own_names, *(tensor for keeper in keepers.values() for tensor in tensors_within(keeper))]


def tensors_within(value: Any, depth: int = 3) -> list[Tensor]:  # noqa: ANN401
    """Return the tensors in a value, down to `depth` nested containers or caches."""
    if isinstance(value, Tensor):
        return [value]
    if not depth:
        return []
    if type(value) is _CACHE:
        return [x for held in gc.get_referents(value) if type(held) is not FunctionType for x in tensors_within(held, depth - 1)]
    if type(value) is dict or isinstance(value, Mapping):  # the second test takes longer
        value = list(value.values()) if len(value) <= _MOST else []
    if isinstance(value, (tuple, list)) and len(value) <= _MOST:
        return [x for item in value if type(item) not in _WITHOUT for x in tensors_within(item, depth - 1)]
    return []


def _keepers(place: Any) -> list[Any]:  # noqa: ANN401
    """Return the caches and containers of a class or a module of Python; they are searched once."""
    if place not in _keeping:
        _keeping[place] = [keeper for value in list(vars(place).values()) for keeper in _keepers_in(value)]
    return _keeping[place]


def _keepers_in(value: Any, depth: int = 3) -> list[Any]:  # noqa: ANN401
    """Return a value that is a cache or a container, or those that the decorators of a function hold."""
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if type(value) in (dict, list, _CACHE):
        return [value]
    if type(value) is not FunctionType or not depth:
        return []
    return [
        keeper for cell in value.__closure__ or () if _is_filled(cell) for keeper in _keepers_in(cell.cell_contents, depth - 1)
    ]


def _is_filled(cell: Any) -> bool:  # noqa: ANN401
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that has no value yet
        return False
