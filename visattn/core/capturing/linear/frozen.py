"""Normalizations whose statistics are numbers, so that they are linear up to their bias: the value stays, the gradient changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from visattn.core.capturing.trace.operations import operation_of


class FrozenNorms(TorchFunctionMode):
    """Function mode in which the statistics of normalizations are numbers.

    Attributes:
        ran: Whether there were any.
    """

    ran = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        """Run a function of PyTorch; PyTorch calls this method instead of the function."""
        operation, out = operation_of(func), func(*args, **kwargs or {})
        if operation.own and operation.name in _NORMS and out.requires_grad:
            self.ran = True
            return norm(operation.name, args, kwargs or {}, out)
        return out


def norm(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> Tensor:
    """Return the result of a normalization with the gradient that it has when its statistics are numbers."""
    named = dict(kwargs)
    positional = [named.pop("input"), *args] if "input" in named else args
    with torch._C.DisableTorchFunction():
        return replaced(_NORMS[name](*positional, **named), out)


def replaced(graph: Tensor, value: Tensor) -> Tensor:
    """Return a tensor with the value of one and the gradient of another."""
    result: Tensor = _Replaced.apply(graph, value.detach())
    return result


class _Replaced(torch.autograd.Function):
    """Value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, graph: Tensor, value: Tensor) -> Tensor:  # noqa: ANN401
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gradient, None


def _layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    scale = (x.detach().var(dims, correction=0, keepdim=True) + eps).rsqrt()
    return _affine((x - x.mean(dims, keepdim=True)) * scale, weight, bias)


def _rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    least = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(x * (x.detach().square().mean(dims, keepdim=True) + least).rsqrt(), weight, None)


def _group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    groups = x.reshape(len(x), num_groups, -1, *x.shape[2:])
    dims = tuple(range(2, groups.ndim))
    scale = (groups.detach().var(dims, correction=0, keepdim=True) + eps).rsqrt()
    normal = ((groups - groups.mean(dims, keepdim=True)) * scale).view_as(x)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return _affine(normal, None if weight is None else weight.view(shape), None if bias is None else bias.view(shape))


def _normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    length: Tensor = x.detach().norm(p, dim, keepdim=True)
    return x / length.clamp_min(eps)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled: Tensor = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


_NORMS: Mapping[str, Callable[..., Tensor]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "normalize": _normalize,
}
