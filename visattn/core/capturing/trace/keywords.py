"""Keyword arguments of calls: those that PyTorch forgets when it hands a call over to a function mode, and their order."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload
from torch.overrides import get_testing_overrides

DROPPED: dict[Callable[..., Any], str] = {torch.functional.chain_matmul: "out", F.l1_loss: "weight"}


def restored(func: Callable[..., Any], kwargs: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the keyword arguments of a call, completed by one that PyTorch has not handed over, such as `weight` of `F.l1_loss`.

    Its value is read from the local variables of the function, which is running on the Python stack.
    """
    name = DROPPED.get(func)
    if name is None or (kwargs and name in kwargs):
        return kwargs
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not func.__code__:
        frame = frame.f_back
    value = None if frame is None else frame.f_locals.get(name)
    return kwargs if value is None else {**(kwargs or {}), name: value}


def in_order(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return keyword arguments in the order in which the function declares them, as the operands of a call are told by their order.

    Those of a function that PyTorch does not let be replaced, and those that it does not declare, keep their order.
    """
    names = _declared(func)
    return dict(sorted(kwargs.items(), key=lambda item: names.get(item[0], len(names))))


@lru_cache(2048)
def _declared(func: Callable[..., Any]) -> Mapping[str, int]:
    """Return the number of each parameter of a function or operator of PyTorch, by name; nothing for any other."""
    if isinstance(func, OpOverload):
        return {argument.name: number for number, argument in enumerate(func._schema.arguments)}
    declaration = get_testing_overrides().get(func)
    return {} if declaration is None else {name: number for number, name in enumerate(inspect.signature(declaration).parameters)}
