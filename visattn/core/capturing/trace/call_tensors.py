"""Tensors among the arguments and results of a function call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.trace.operations import operation_of

SWITCH = torch._C._set_grad_enabled  # begin and end of `torch.no_grad` and its like
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor  # tensors inside torch.func transforms such as vmap and grad


def changes(func: Callable[..., Any], args: Sequence[Any], out: Any) -> bool:  # noqa: ANN401
    """Check whether a call returned or changed a tensor, or whether gradients are recorded from here on."""
    return func is SWITCH or any(isinstance(result, Tensor) for result in results_of(args, out, operation_of(func).writes))


def results_of(args: Sequence[Any], out: Any, writes: bool) -> tuple[Any, ...]:  # noqa: ANN401
    """Return the results of a call as a tuple; for a call that returned none but writes, such as `__setitem__`, its first argument.

    `writes` tells whether the function writes into its first argument.
    """
    if isinstance(out, Tensor):
        return (out,)
    is_tuple = isinstance(out, tuple) and not isinstance(out, torch.Size)
    if type(out) is list or is_tuple:
        return tuple(out)
    return tuple(tensors_in(args[0])) if writes and args else ()


def tensors_in(value: Any) -> list[Tensor]:  # noqa: ANN401
    """Return the tensors among arguments or results, also those in lists, dictionaries and slices."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, Mapping):
        return tensors_in(list(value.values()))
    if isinstance(value, slice):
        return tensors_in((value.start, value.stop, value.step))
    return []


def lead_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that count patches: `(N,)`, or `(B, N)` if each image has a sequence of its own."""
    return tuple(shape[: 2 if len(shape) == 3 else 1])


def positions_among(results: Iterable[Any], lead: tuple[int, ...]) -> list[Tensor]:
    """Return copies of the tensors of whole numbers that may hold the row and column of each patch, `(*lead, 2)` or `(*lead, 3)`.

    Models that take patches of several images in one sequence compute such tensors. `lead` are the axes that count patches.
    """
    tensors = [result for result in results if isinstance(result, Tensor)]
    fitting = [tensor for tensor in tensors if tuple(tensor.shape[:-1]) == lead and tensor.shape[-1] in (2, 3)]
    return [tensor.clone() for tensor in fitting if not tensor.is_floating_point() or bool((tensor == tensor.floor()).all())]


def transformed(values: Iterable[Any]) -> bool:
    """Check whether one of the values, or of those in lists of tensors, is a tensor inside `torch.vmap` or another transform."""
    for value in values:
        if isinstance(value, Tensor):
            if is_transformed(value):
                return True
            continue
        is_list_of_tensors = isinstance(value, (tuple, list)) and value and isinstance(value[0], Tensor)
        if is_list_of_tensors and transformed(value):
            return True
    return False


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share; a unique negative number if it has none."""
    with torch._C.DisableTorchFunction():  # a capture around this one must not take it for a read
        return address_of(tensor)


def address_of(tensor: Tensor) -> int:
    """Return what `memory_of` returns, where no function mode is open."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # sparse and meta tensors have no storage
        return -id(tensor)


class Untraceable(Exception):
    """Error: the tensor belongs to a torch.func transform and does not exist outside it."""
