"""Helpers for tensors of position codes, which shadow the tensors of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.capturing.tokens.planes import PADDING, Plane, shared
from visattn.geometry import Box


def flat(items: Any) -> list[Any]:  # noqa: ANN401
    """Flatten nested lists and tuples."""
    return [x for item in items for x in (flat(item) if isinstance(item, (tuple, list)) else [item])]


def compact(codes: Tensor) -> Tensor:
    """Shrink expanded axes (stride 0) to size 1."""
    for dim, (stride, size) in enumerate(zip(codes.stride(), codes.shape, strict=True)):
        if stride == 0 and size > 1:
            codes = codes.narrow(dim, 0, 1)
    return codes


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
        return F.pad(codes, widths, value=PADDING)
    return F.pad(codes.double(), widths, mode=mode).int()


class Geometry2d(NamedTuple):
    """Kernel extent, stride and padding of a convolution or pooling, in cells, vertical and horizontal."""

    reach: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[float, float]


def geometry_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], weight: Sequence[int] | None) -> Geometry2d | None:
    """Return the geometry of a convolution or pooling, or None for other operations; `weight` is the shape of the convolution's weight."""
    if name in ("conv2d", "convolution"):
        given = dict(zip(["input", "weight", "bias", "stride", "padding", "dilation", "transposed"], args, strict=False)) | dict(
            kwargs
        )
        if weight is None or given.get("transposed", False) is True:
            return None
        kernel, stride = tuple(weight[-2:]), _pair(given.get("stride", 1))
        dilation = _pair(given.get("dilation", 1))
    elif name in ("avg_pool2d", "max_pool2d", "lp_pool2d", "max_pool2d_with_indices"):
        names = ["input", "kernel_size", "stride", "padding", "dilation"]
        given = dict(zip(names[:4] if name == "avg_pool2d" else names, args, strict=False)) | dict(kwargs)
        kernel = _pair(given["kernel_size"])
        stride = _pair(given.get("stride") or kernel)
        dilation = _pair(given.get("dilation", 1)) if name.startswith("max") else (1, 1)
    else:
        return None
    reach = tuple((size - 1) * gap + 1 for size, gap in zip(kernel, dilation, strict=True))
    before = given.get("padding", 0)
    if before == "same":
        padding: tuple[Any, ...] = tuple((size - 1) // 2 for size in reach)
    else:
        padding = (0, 0) if before == "valid" else _pair(before)
    return Geometry2d((reach[0], reach[1]), (stride[0], stride[1]), (padding[0], padding[1]))


def covered(plane: Plane, before: tuple[int, int], rows: int, columns: int, geometry: Geometry2d | None) -> Box:
    """Return the box that a resampled plane covers.

    Cells of non-overlapping patches cover exactly the cells they read; other cells cover even shares around their centers.
    """
    box = plane.box
    if geometry is None:
        return box
    sides = []
    for axis, (start, stop, count) in enumerate(((box.top, box.bottom, rows), (box.left, box.right, columns))):
        scale = (stop - start) / plane.grid[axis]
        reach, step = geometry.reach[axis], geometry.stride[axis]
        begin = start - (before[axis] + geometry.padding[axis]) * scale
        if reach == step and not geometry.padding[axis]:
            sides.append((begin, begin + count * step * scale))
        else:
            sides.append(shared(begin + reach / 2 * scale, step * scale, count, start, stop))
    (top, bottom), (left, right) = sides
    return Box(top, left, bottom, right)


def _pair(value: Any) -> tuple[Any, ...]:  # noqa: ANN401
    return (value, value) if isinstance(value, int) else tuple(value) * (2 if len(value) == 1 else 1)
