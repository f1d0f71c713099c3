"""Codes for places: every cell of every token grid of a forward has a number of its own, for each image of the batch.

A *plane* is a grid over the model's input: the pixels, the patches, a stage's pooled patches. Learned tokens (a class token) are
planes without a grid. Two routes to one grid give one plane, so that tokens that are the same have the same codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visattn.geometry import Box

PADDING = -1
_SLACK = 1e-6


@dataclass(frozen=True)
class Plane:
    """Codes `base + image * cells + cell`, the cells of a grid in raster order."""

    base: int
    grid: tuple[int, ...]  # () is one learned token
    box: Box
    name: str = ""

    @property
    def cells(self) -> int:
        """Number of cells."""
        return self.grid[0] * self.grid[1] if self.grid else 1


class Planes:
    """All planes of one forward."""

    def __init__(self, images: int, input_size: tuple[int, int], device: torch.device) -> None:
        """Start with no plane."""
        self.images, self.input, self.device = images, Box(0, 0, *input_size), device
        self._planes: list[Plane] = []
        self._known: dict[object, Plane] = {}
        self._bases = torch.empty(0, dtype=torch.int64, device=device)

    def grid(self, rows: int, columns: int, box: Box) -> Plane:
        """The plane of a grid over a box."""
        key = rows, columns, tuple(round(side, 3) for side in box)
        return self._known.get(key) or self._add(key, (rows, columns), box, "")

    def learned(self, name: str) -> Plane:
        """The plane of a learned token."""
        return self._known.get(name) or self._add(name, (), self.input, name)

    def _add(self, key: object, grid: tuple[int, ...], box: Box, name: str) -> Plane:
        base = self._planes[-1].base + self._planes[-1].cells * self.images if self._planes else 0
        plane = self._known[key] = Plane(base, grid, box, name)
        self._planes.append(plane)
        self._bases = torch.tensor([known.base for known in self._planes], device=self.device)
        return plane

    def codes(self, plane: Plane) -> Tensor:
        """`(images, rows, columns)`, or `(images, 1)` for a learned token."""
        shape = plane.grid or (1,)
        count = self.images * plane.cells
        return torch.arange(plane.base, plane.base + count, dtype=torch.int32, device=self.device).view(self.images, *shape)

    def of(self, codes: Tensor) -> list[Plane]:
        """The planes that codes are of, in the order in which they were met; padding is of none."""
        real = codes[codes >= 0]
        met = torch.unique(torch.bucketize(real, self._bases, right=True) - 1)
        return [self._planes[i] for i in met.tolist()]

    def raster(self, codes: Tensor) -> tuple[Plane | None, tuple[int, int]]:
        """The plane of which `(groups, rows, columns)` codes are the whole, in raster order in each group.

        There may be padding around it, whose rows and columns before it are the second result.
        """
        real = codes[0] >= 0
        inside = [real.any(dim).nonzero().flatten() for dim in (1, 0)]
        if not all(len(side) for side in inside):
            return None, (0, 0)
        (top, bottom), (left, right) = ((int(side[0]), int(side[-1]) + 1) for side in inside)
        whole = codes[:, top:bottom, left:right]
        planes = self.of(whole[0])
        if len(planes) != 1 or planes[0].grid != tuple(whole.shape[1:]) or bool((whole < 0).any()):
            return None, (0, 0)
        _, cell = self.split(whole, planes[0])
        fits = bool((cell == torch.arange(planes[0].cells, device=self.device).view_as(whole[0])).all())
        return (planes[0] if fits else None), (top, left)

    def merge(self, codes: Tensor, dim: int) -> Tensor | None:
        """Codes of the cells that arise when the cells along `dim` are merged, `(..., 1, ...)`; None if they make no grid."""
        planes = self.of(codes)
        if len(planes) != 1 or not planes[0].grid:
            return None
        plane, real = planes[0], codes >= 0
        image, cell = self.split(codes, plane)
        count = real.sum(dim, keepdim=True)
        some = count > 0
        low, high = (image.masked_fill(~real, bad) for bad in (self.images, -1))
        image = low.amin(dim, keepdim=True)
        if bool(((image != high.amax(dim, keepdim=True)) & some).any()):
            return None
        columns = plane.grid[1]
        row, column = (
            (part.masked_fill(~real, 0).sum(dim, keepdim=True, dtype=torch.float64) / count)[some]
            for part in (cell // columns, cell % columns)
        )
        lattice = self.lattice(plane, row, column, merged=True)
        if lattice is None:
            return None
        merged, cell = lattice
        made = torch.full_like(image, PADDING)  # of nothing but padding
        made[some] = (merged.base + image[some] * merged.cells + cell).to(made.dtype)
        return made

    def split(self, codes: Tensor, plane: Plane) -> tuple[Tensor, Tensor]:
        """Image and cell of the codes of one plane."""
        local = codes - plane.base
        return local // plane.cells, local % plane.cells

    def lattice(self, plane: Plane, row: Tensor, column: Tensor, *, merged: bool = False) -> tuple[Plane, Tensor] | None:
        """The grid whose cells lie at these rows and columns of `plane`, and the cell of each; None if they make no grid."""
        vertical = _regular(row, plane.grid[0], plane.box.top, plane.box.bottom, merged)
        horizontal = _regular(column, plane.grid[1], plane.box.left, plane.box.right, merged)
        if vertical is None or horizontal is None:
            return None
        (rows, r, top, bottom), (columns, c, left, right) = vertical, horizontal
        cell = r * columns + c
        if torch.unique(cell).numel() != rows * columns:
            return None
        return self.grid(rows, columns, Box(top, left, bottom, right)), cell


def _regular(at: Tensor, length: int, start: float, stop: float, merged: bool) -> tuple[int, Tensor, float, float] | None:
    """Number of distinct positions along a side, the rank of each, and what they cover of `[start, stop)`.

    Positions must be evenly spaced; the last may be nearer, where a side did not divide. Cells at every second position stand for
    two each. None where they are not, or where one position is left that is not the middle.
    """
    values, rank = torch.unique(at.double(), return_inverse=True)
    count = len(values)
    if count == 1:
        if abs(float(values[0]) - (length - 1) / 2) > _SLACK:
            return None  # one row of several: it may stand for itself or for all
        step = float(length)
    else:
        steps = values.diff()
        step = float(steps[0])
        if bool((steps[:-1] - step).abs().max() > _SLACK if count > 2 else False) or float(steps[-1]) > step + _SLACK:
            return None
    first = int(float(values[0]) // step * step)
    scale = (stop - start) / length
    last = first + step * count
    return count, rank, start + first * scale, start + (last if merged else min(last, length)) * scale
