"""Arguments that PyTorch's Python functions forget when they hand a call over to a function mode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F

_DROPPED: dict[Callable[..., Any], str] = {torch.functional.chain_matmul: "out", F.l1_loss: "weight"}


def restored(func: Callable[..., Any], kwargs: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the keyword arguments of a call, completed by one that PyTorch has not handed over, such as `weight` of `F.l1_loss`.

    Its value is read from the local variables of the function, which is running on the Python stack.
    """
    name = _DROPPED.get(func)
    if name is None or (kwargs and name in kwargs):
        return kwargs
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not func.__code__:
        frame = frame.f_back
    value = None if frame is None else frame.f_locals.get(name)
    return kwargs if value is None else {**(kwargs or {}), name: value}
