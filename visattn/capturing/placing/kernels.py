"""Mass of the kernels of convolutions: tokens behind a kernel that leans to one side do not lie where its center does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_HALF = 0.51  # distance of the center of mass from the center of a cell, in cells or gaps, up to which it is that of the cell
_MORE = 0.1  # beyond the distance of the kernel's own center, for kernels of an even size, which lie half a cell beside


class Kernel(NamedTuple):
    """Facts about places that the values of a kernel tell.

    Attributes:
        centered: Whether its center of mass, over all channels, is that of the cell, and it reads the cell there.
        tap: Index of its only tap that is not zero; None if there are others.
    """

    centered: bool
    tap: tuple[int, ...] | None = None


class Kind(NamedTuple):
    """Use of a kernel by a convolution, along each axis, in cells that its taps read.

    Attributes:
        gaps: Distances of two taps.
        cells: Sizes of a new cell.
        centers: Distances of the first tap from the center of the new cell.
    """

    gaps: tuple[int, ...]
    cells: tuple[int, ...]
    centers: tuple[float, ...]


UNKNOWN = Kernel(centered=False)


def kind_of(taps: Sequence[int], given: Mapping[str, Any]) -> Kind | None:
    """Return how a convolution with these arguments uses a kernel of some size; None if its values do not matter.

    They do not if each window lies in its own cell.
    """
    stride, padding, gaps = (
        _each(given.get(name, default), len(taps)) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    if not any(padding) and all((size - 1) * gap < step for size, gap, step in zip(taps, gaps, stride, strict=True)):
        return None
    cells = (1,) * len(taps) if given.get("transposed", False) else stride
    even = [before + (step - 1) / 2 for before, step in zip(padding, stride, strict=True)]  # where cells share the maps evenly
    own = [(size - 1) * gap / 2 for size, gap in zip(taps, gaps, strict=True)]
    centers = (one if abs(one - other) <= cell / 2 else other for one, other, cell in zip(even, own, cells, strict=True))
    return Kind(gaps, cells, tuple(centers))


def _each(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value) * (axes if len(value) == 1 else 1)


def kernel_of(weight: Tensor, kind: Kind) -> Kernel:
    """Return what the values of a kernel `(channels, channels, *taps)` say now: code may overwrite it without any trace."""
    with torch.no_grad():
        mass = weight.flatten(0, 1).abs().float().square().sum(0).sqrt().cpu()
    taps = mass.nonzero()
    if not bool(mass.isfinite().all()) or not len(taps):
        return Kernel(centered=not len(taps))
    middle, centered = torch.ones_like(mass, dtype=torch.bool), True
    for axis, (gap, cell, center) in enumerate(zip(*kind, strict=True)):
        size = mass.shape[axis]
        cell = max(cell, gap)  # taps with gaps tell no finer places
        away = ((torch.arange(size) * gap - center) / cell).view([-1 if dim == axis else 1 for dim in range(mass.ndim)])
        limit = max(_HALF, abs((size - 1) * gap / 2 - center) / cell + _MORE)
        centered &= abs(float((mass * away).sum() / mass.sum())) <= limit
        middle &= away.abs() <= _HALF * max(1, kind.cells[axis]) / cell
    return Kernel(centered and bool((mass[middle] > 0).any()), tuple(taps[0].tolist()) if len(taps) == 1 else None)
