"""Helpers for tensors of position codes, which shadow the tensors of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.capturing.tokens.planes import PADDING, compact


def flat(items: Any) -> list[Any]:  # noqa: ANN401
    """Flatten nested lists and tuples."""
    return [x for item in items for x in (flat(item) if isinstance(item, (tuple, list)) else [item])]


def equal(a: Tensor, b: Tensor) -> bool:
    """Check whether two tensors of one shape hold the same values."""
    if a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride():
        return True
    for dim in range(a.ndim):
        if a.stride(dim) == b.stride(dim) == 0 and a.shape[dim] > 1:
            a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
    return a.shape == b.shape and bool((a == b).all())


def same_along(codes: Tensor, dim: int) -> bool:
    """Check whether codes are constant along an axis."""
    if codes.stride(dim) == 0 or codes.shape[dim] == 1:
        return True
    if not codes.numel():
        return True
    corner = [0] * codes.ndim
    first = codes[tuple(corner)]
    corner[dim] = -1
    if first != codes[tuple(corner)]:  # a fast test: codes that vary mostly differ at the ends
        return False
    codes = compact(codes)
    return bool((codes == codes.narrow(dim, 0, 1)).all())


def aligned(codes: Tensor, names: str, result: str, shape: torch.Size) -> Tensor | None:
    """Bring codes to the axes of an einsum's result; return None if they vary along a summed axis."""
    for dim in reversed(range(len(names))):
        if names[dim] not in result:
            if not same_along(codes, dim):
                return None
            codes = codes.narrow(dim, 0, 1).squeeze(dim)
            names = names[:dim] + names[dim + 1 :]
    order = [names.index(letter) for letter in result if letter in names]
    codes = codes.permute(order)
    for dim, letter in enumerate(result):
        if letter not in names:
            codes = codes.unsqueeze(dim)
    return codes.expand(shape)


def along(change: Callable[..., Tensor], axes: Sequence[int], codes: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
    """Apply a change that moves codes along some axes only; other axes along which the codes are expanded stay so."""
    moved, shape = {axis % codes.ndim for axis in axes}, {}
    for axis, size in enumerate(codes.shape):
        if axis not in moved and size > 1 and codes.stride(axis) == 0:
            codes, shape[axis] = codes.narrow(axis, 0, 1), size
    made = change(codes, *args, **kwargs)
    return made.expand([shape.get(axis, size) for axis, size in enumerate(made.shape)]) if shape else made


def reshaped(codes: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape codes; a last axis along which they are expanded stays so if it keeps its size."""
    if codes.ndim and len(shape) and codes.stride(-1) == 0 and codes.shape[-1] == shape[-1] > 1:
        return codes.narrow(-1, 0, 1).reshape(*shape[:-1], 1).expand(*shape)
    return codes.reshape(*shape)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join codes along an axis; axes along which all of them are expanded stay so."""
    shape = list(parts[0].shape)
    for axis, size in enumerate(shape):
        if axis != dim and size > 1 and all(part.stride(axis) == 0 for part in parts):
            parts = [part.narrow(axis, 0, 1) for part in parts]
    whole = torch.cat(list(parts), dim)
    shape[dim] = whole.shape[dim]
    return whole.expand(shape)


def padded(codes: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Pad codes as the tensor is padded; channels that are added to tokens get the codes of these tokens."""
    widths = list(args[0] if args else kwargs["pad"])
    mode = args[1] if len(args) > 1 and isinstance(args[1], str) else kwargs.get("mode", "constant")
    if mode == "constant":
        for dim in range(codes.ndim - len(widths) // 2, codes.ndim):
            at = 2 * (codes.ndim - 1 - dim)
            if codes.shape[dim] > 1 and same_along(codes, dim):
                size = list(codes.shape)
                size[dim] += widths[at] + widths[at + 1]
                codes, widths[at : at + 2] = codes.narrow(dim, 0, 1).expand(size), (0, 0)
        padding = [codes.ndim - 1 - at // 2 for at in range(0, len(widths), 2) if widths[at] or widths[at + 1]]
        return along(F.pad, padding, codes, widths, value=PADDING)
    return F.pad(codes.double(), widths, mode=mode).int()


class Geometry2d(NamedTuple):
    """Kernel extent, stride and padding of a convolution or pooling, in cells, vertical and horizontal."""

    reach: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[float, float]
