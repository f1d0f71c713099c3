"""Tensors among the arguments and results of a function call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.trace.operations import operation_of

SWITCH = torch._C._set_grad_enabled  # begin and end of `torch.no_grad` and its like
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor  # tensors inside torch.func transforms such as vmap and grad


def changes(func: Callable[..., Any], args: Sequence[Any], out: Any) -> bool:  # noqa: ANN401
    """Check whether a call returned or changed a tensor, or whether gradients are recorded from here on."""
    return func is SWITCH or any(isinstance(result, Tensor) for result in results_of(args, out, operation_of(func).writes))


def results_of(args: Sequence[Any], out: Any, writes: bool) -> tuple[Any, ...]:  # noqa: ANN401
    """Return the results of a call, or the tensors that it wrote into if it returned none."""
    if isinstance(out, Tensor):
        return (out,)
    if type(out) is tuple or type(out) is list or (isinstance(out, tuple) and not isinstance(out, torch.Size)):
        return tuple(out)
    return tuple(tensors_in(args[0])) if writes and args else ()


def tensors_in(value: Any) -> list[Tensor]:  # noqa: ANN401
    """Return the tensors among arguments or results, nested ones too."""
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
    """Return copies of the tensors of whole numbers that may hold the row and column of each patch, `(*lead, 2)` or `(*lead, 3)`."""
    fitting = [x for x in results if isinstance(x, Tensor) and tuple(x.shape[:-1]) == lead and x.shape[-1] in (2, 3)]
    return [x.clone() for x in fitting if not x.is_floating_point() or bool((x == x.floor()).all())]


def transformed(values: Iterable[Any]) -> bool:
    """Check whether one of the values is a tensor of a torch.func transform."""
    for value in values:
        if isinstance(value, Tensor):
            if is_transformed(value):
                return True
        elif isinstance(value, (tuple, list)) and value and isinstance(value[0], Tensor) and transformed(value):
            return True
    return False


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or a unique negative number if it has none."""
    try:
        with torch._C.DisableTorchFunction():  # a capture around this one must not take it for a read
            return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # sparse and meta tensors have no storage
        return -id(tensor)


class Untraceable(Exception):
    """Error: the tensor belongs to a torch.func transform and does not exist outside it."""
