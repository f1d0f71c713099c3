"""Small tools for codes: tensors of places that lie beside the tensors of a forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visattn._capture._planes import PADDING, Plane
from visattn.geometry import Box


def flat(items: Any) -> list[Any]:  # noqa: ANN401
    return [x for item in items for x in (flat(item) if isinstance(item, (tuple, list)) else [item])]


def name_of(func: Any) -> str:  # noqa: ANN401
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func.__self__, "__name__", "")
    name = name.partition(".")[0]
    return name if name.startswith("__") else name.strip("_")


def compact(codes: Tensor) -> Tensor:
    """Without the axes along which nothing is stored."""
    for dim, (stride, size) in enumerate(zip(codes.stride(), codes.shape, strict=True)):
        if stride == 0 and size > 1:
            codes = codes.narrow(dim, 0, 1)
    return codes


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same."""
    if a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride():
        return True
    for dim in range(a.ndim):
        if a.stride(dim) == b.stride(dim) == 0 and a.shape[dim] > 1:
            a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
    return a.shape == b.shape and bool((a == b).all())


def same_along(codes: Tensor, dim: int) -> bool:
    """Whether codes are the same all along an axis."""
    if codes.stride(dim) == 0 or codes.shape[dim] == 1:
        return True
    codes = compact(codes)
    return bool((codes == codes.narrow(dim, 0, 1)).all())


def aligned(codes: Tensor, names: str, result: str, shape: torch.Size) -> Tensor | None:
    """Codes in the axes of an einsum's result; None if they vary along an axis that is summed over."""
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


def padded(codes: Tensor, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    widths = args[0] if args else kwargs["pad"]
    mode = args[1] if len(args) > 1 else kwargs.get("mode", "constant")
    if mode == "constant":
        return F.pad(codes, widths, value=PADDING)
    return F.pad(codes.double(), widths, mode=mode).int()


@dataclass(frozen=True)
class Geometry2d:
    """Kernel, stride and whether cells share pixels, of a convolution or a pooling."""

    stride: tuple[int, int]
    overlapping: bool


def geometry_of(name: str, args: list[Any], kwargs: dict[str, Any]) -> Geometry2d | None:
    if name == "conv2d":
        given = dict(zip(["input", "weight", "bias", "stride", "padding"], args, strict=False)) | kwargs
        kernel, stride = tuple(given["weight"].shape[-2:]), _pair(given.get("stride", 1))
    elif name in ("avg_pool2d", "max_pool2d"):
        given = dict(zip(["input", "kernel_size", "stride", "padding"], args, strict=False)) | kwargs
        kernel = _pair(given["kernel_size"])
        stride = _pair(given.get("stride") or kernel)
    else:
        return None
    return Geometry2d(stride, kernel != stride or _pair(given.get("padding", 0)) != (0, 0))


def covered(plane: Plane, before: tuple[int, int], rows: int, columns: int, geometry: Geometry2d | None) -> Box:
    """What the cells of a resampled plane cover: patches side by side exactly what they saw, others an even share of the whole."""
    box = plane.box
    if geometry is None or geometry.overlapping:
        return box
    height, width = box.height / plane.grid[0], box.width / plane.grid[1]
    top, left = box.top - before[0] * height, box.left - before[1] * width
    return Box(top, left, top + rows * geometry.stride[0] * height, left + columns * geometry.stride[1] * width)


def _pair(value: Any) -> tuple[Any, ...]:  # noqa: ANN401
    if isinstance(value, str):
        return (value, value)
    return (value, value) if isinstance(value, int) else tuple(value) * (2 if len(value) == 1 else 1)
