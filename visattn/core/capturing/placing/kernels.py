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
    """Return how a convolution with the arguments `given` places a kernel of size `taps`; None if its values do not matter.

    They do not matter if each window lies in its own cell, as for a patch embedding, whose stride is the kernel size.
    """
    axes = len(taps)
    stride = _for_each_axis(given.get("stride", 1), axes)
    padding = _for_each_axis(given.get("padding", 0), axes)
    gaps = _for_each_axis(given.get("dilation", 1), axes)
    extents = [(size - 1) * gap for size, gap in zip(taps, gaps, strict=True)]
    if not any(padding) and all(extent < step for extent, step in zip(extents, stride, strict=True)):
        return None
    cells = (1,) * axes if given.get("transposed", False) else stride
    centers = []
    for before, step, extent, cell in zip(padding, stride, extents, cells, strict=True):
        even_center = before + (step - 1) / 2  # where new cells share the map evenly
        kernel_center = extent / 2
        centers.append(even_center if abs(even_center - kernel_center) <= cell / 2 else kernel_center)
    return Kind(gaps, cells, tuple(centers))


def _for_each_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """Return an argument of a convolution, such as `stride`, for each axis; one number holds for all axes."""
    return (value,) * axes if isinstance(value, int) else tuple(value) * (axes if len(value) == 1 else 1)


def kernel_of(weight: Tensor, kind: Kind) -> Kernel:
    """Return whether a kernel `(channels, channels, *taps)` has its center of mass in the center of the cell, or a single tap.

    A kernel that leans to one side moves tokens.
    """
    return kernel_with(mass_of(weight).cpu(), kind)


def mass_of(weight: Tensor) -> Tensor:
    """Return the mass `(*taps)` of each tap of a kernel `(channels, channels, *taps)`: the norm of its weights, on their device."""
    with torch.no_grad():
        over_rows = weight.flatten(1).float().square().sum(0)  # several times faster than the sum over both axes
        return over_rows.view(weight.shape[1:]).sum(0).sqrt()


def kernel_with(mass: Tensor, kind: Kind) -> Kernel:
    """Return what a kernel with this mass of its taps, in memory of the CPU, says about places; see `kernel_of`."""
    taps = mass.nonzero()
    if not bool(mass.isfinite().all()) or not len(taps):
        return Kernel(centered=not len(taps))
    in_cell, is_centered = torch.ones_like(mass, dtype=torch.bool), True
    for axis, (gap, cell, center) in enumerate(zip(*kind, strict=True)):
        size = mass.shape[axis]
        unit = max(cell, gap)  # taps with gaps tell no finer places
        broadcastable = [-1 if dim == axis else 1 for dim in range(mass.ndim)]
        distance = ((torch.arange(size) * gap - center) / unit).view(broadcastable)
        kernel_center = (size - 1) * gap / 2
        limit = max(_HALF, abs(kernel_center - center) / unit + _MORE)
        center_of_mass = float((mass * distance).sum() / mass.sum())
        is_centered &= abs(center_of_mass) <= limit
        in_cell &= distance.abs() <= _HALF * max(1, cell) / unit
    reads_cell = bool((mass[in_cell] > 0).any())
    only_tap = tuple(taps[0].tolist()) if len(taps) == 1 else None
    return Kernel(is_centered and reads_cell, only_tap)
