"""Helpers for tensors of position codes, which shadow the tensors of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.core.capturing.tokens.planes import PADDING, compact


def flat(items: Any) -> list[Any]:  # noqa: ANN401
    """Return the items of nested lists and tuples as one list."""
    flattened = list[Any]()
    for item in items:
        flattened += flat(item) if isinstance(item, (tuple, list)) else [item]
    return flattened


def equal(a: Tensor, b: Tensor) -> bool:
    """Check whether two tensors of one shape hold the same values; expanded axes (stride 0) are compared once."""
    is_same_memory = a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
    if is_same_memory:
        return True
    for dim in range(a.ndim):
        are_expanded = a.stride(dim) == b.stride(dim) == 0
        if are_expanded and a.shape[dim] > 1:
            a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
    return a.shape == b.shape and bool((a == b).all())


def same_along(codes: Tensor, dim: int) -> bool:
    """Check whether position codes (cell of the image that each element is from) are constant along an axis, as along channels."""
    is_expanded = codes.stride(dim) == 0
    if is_expanded or codes.shape[dim] == 1:
        return True
    if not codes.numel():
        return True
    index = [0] * codes.ndim
    first = codes[tuple(index)]
    index[dim] = -1
    last = codes[tuple(index)]
    if first != last:  # a fast test: codes that vary mostly differ at the ends
        return False
    codes = compact(codes)
    return bool((codes == codes.narrow(dim, 0, 1)).all())


def aligned(codes: Tensor, names: str, result: str, shape: torch.Size) -> Tensor | None:
    """Bring codes of an operand to the axes of an einsum's result; return None if they vary along a summed axis.

    Args:
        codes: Position codes of the operand.
        names: Axis letters of the operand, such as `bqd` in `bqd,bkd->bqk`.
        result: Axis letters of the result.
        shape: Shape of the result.
    """
    for dim in reversed(range(len(names))):
        is_summed = names[dim] not in result
        if not is_summed:
            continue
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
    """Return codes after a change that acts on some axes only, such as a padding; expanded other axes (stride 0) stay so."""
    changed_axes, expanded_sizes = {axis % codes.ndim for axis in axes}, {}
    for axis, size in enumerate(codes.shape):
        is_expanded = size > 1 and codes.stride(axis) == 0
        if is_expanded and axis not in changed_axes:
            codes, expanded_sizes[axis] = codes.narrow(axis, 0, 1), size
    changed = change(codes, *args, **kwargs)
    if not expanded_sizes:
        return changed
    return changed.expand([expanded_sizes.get(axis, size) for axis, size in enumerate(changed.shape)])


def reshaped(codes: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape codes; a last axis along which they are expanded (stride 0), as channels are, stays so if it keeps its size."""
    if codes.ndim and len(shape) and codes.stride(-1) == 0 and codes.shape[-1] == shape[-1] > 1:
        return codes.narrow(-1, 0, 1).reshape(*shape[:-1], 1).expand(*shape)
    return codes.reshape(tuple(shape))


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate codes along an axis; axes along which all of them are expanded (stride 0) stay so."""
    shape = list(parts[0].shape)
    for axis, size in enumerate(shape):
        are_expanded = axis != dim and size > 1 and all(part.stride(axis) == 0 for part in parts)
        if are_expanded:
            parts = [part.narrow(axis, 0, 1) for part in parts]
    concatenated = torch.cat(list(parts), dim)
    shape[dim] = concatenated.shape[dim]
    return concatenated.expand(shape)


def padded(codes: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Pad position codes as `F.pad(tensor, *args, **kwargs)` pads the tensor.

    Zeros get the code of padding. But channels that are added to tokens get the codes of these tokens.
    """
    widths = list(args[0] if args else kwargs["pad"])
    mode = args[1] if len(args) > 1 and isinstance(args[1], str) else kwargs.get("mode", "constant")
    if mode != "constant":
        return F.pad(codes.double(), widths, mode=mode).int()
    for dim in range(codes.ndim - len(widths) // 2, codes.ndim):
        before = 2 * (codes.ndim - 1 - dim)  # index of the width before the axis; that of the width after it follows
        is_channel_axis = codes.shape[dim] > 1 and same_along(codes, dim)
        if is_channel_axis:
            size = list(codes.shape)
            size[dim] += widths[before] + widths[before + 1]
            codes, widths[before : before + 2] = codes.narrow(dim, 0, 1).expand(size), (0, 0)
    padded_axes = [codes.ndim - 1 - i // 2 for i in range(0, len(widths), 2) if widths[i] or widths[i + 1]]
    return along(F.pad, padded_axes, codes, widths, value=PADDING)


class Geometry2d(NamedTuple):
    """Kernel extent, stride and padding of a convolution or pooling, in cells, vertical and horizontal."""

    reach: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[float, float]
