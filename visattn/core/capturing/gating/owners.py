"""Module that a gate is named by: the one that received the features and computed the gate from them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import takewhile
from types import FrameType
from typing import NamedTuple

from torch import Tensor, nn

from visattn.core.capturing.intercept.written_out import tensors_of
from visattn.core.capturing.trace.tracer import Tracer


class Running(NamedTuple):
    """Call of a module that runs.

    Attributes:
        module: Index of the module in the model; a tape must not hold the module itself.
        inputs: Slots of the tensors that it was called with.
    """

    module: int
    inputs: frozenset[int]


def running_modules(modules: Sequence[nn.Module], tracer: Tracer) -> tuple[Running, ...]:
    """Return the running calls of modules of a model, the outermost first."""
    indices = {module: index for index, module in enumerate(modules)}
    calls = [Running(indices[module], _slots(inputs, tracer)) for module, inputs in _calls() if module in indices]
    return tuple(reversed(calls))


def _calls() -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Yield each module that is being called and the tensors among its arguments, from the Python stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            variables = frame.f_locals
            module = variables.get("self")
            if isinstance(module, nn.Module):
                yield module, tensors_of(variables.get("args", ()), variables.get("kwargs", {}))
        frame = frame.f_back


def _slots(tensors: Collection[Tensor], tracer: Tracer) -> frozenset[int]:
    slots = (tracer.slot_of(tensor) for tensor in tensors)
    return frozenset(slot for slot in slots if slot is not None)


Calls = Sequence[Running]


def owner(
    squashing: Sequence[Calls], multiplying: Calls, features: Callable[[int], bool], modules: Sequence[nn.Module]
) -> int | None:
    """Return the index of the module that computed a gate.

    Args:
        squashing: Calls that ran when the gate was bounded, as by a sigmoid; of a sum of several, those of each.
        multiplying: Calls that ran when the features were multiplied by it.
        features: Function of a slot that returns whether it holds the features, or a view of the same tensor.
        modules: All modules.

    Returns:
        The module, or the one that contains those that computed the terms of a sum; None if all ran in no module of the model.
    """
    owners = {_owner(calls, multiplying, features, modules) for calls in squashing}
    if len(owners) == 1:
        return owners.pop()
    common: Calls = multiplying
    for calls in squashing:
        common = _common(common, calls)
    return common[-1].module if common else None


def _owner(squashing: Calls, multiplying: Calls, features: Callable[[int], bool], modules: Sequence[nn.Module]) -> int | None:
    """Return the innermost module that had received the features when a gate was bounded.

    If there is none, it is the part of the multiplying module that bounded it, or the multiplying module itself.
    """
    receiving = [call.module for call in squashing if any(map(features, call.inputs))]
    if receiving:
        return receiving[-1]
    common = _common(squashing, multiplying)
    parts = [call.module for call in squashing[len(common) : len(common) + 1]]
    if parts and next(modules[parts[0]].parameters(), None) is not None:  # a bare activation computes no gate
        return parts[0]
    return common[-1].module if common else None


def _common(one: Calls, other: Calls) -> Calls:
    """Return the outer calls that two have in common."""
    pairs = takewhile(lambda pair: pair[0].module == pair[1].module, zip(one, other, strict=False))
    return [call for call, _ in pairs]
