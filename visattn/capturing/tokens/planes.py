"""Codes for places: every cell of every token grid of a forward has a number of its own, for each image of the batch.

A *plane* is a grid over the model's input: the pixels, the patches, a stage's pooled patches. Learned tokens (a class token) are
planes without a grid. Two routes to one grid give one plane, so that tokens that are the same have the same codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class Pixels(NamedTuple):
    """The first plane of all."""

    codes: int

    def holds(self, codes: Tensor) -> bool:
        """Whether codes are of this plane; looks at one of them."""
        return bool(codes.numel()) and int(codes.flatten()[0] if codes.is_contiguous() else codes[(0,) * codes.ndim]) < self.codes


class Planes:
    """All planes of one forward."""

    def __init__(self, images: int, input_size: tuple[int, int], device: torch.device) -> None:
        """Start with no plane."""
        self.images, self.input, self.device = images, Box(0, 0, *input_size), device
        self._planes: list[Plane] = []
        self._known: dict[object, Plane] = {}
        self._bases = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def pixels(self) -> Pixels:
        """The plane of the pixels."""
        return Pixels(self.images * int(self.input.height) * int(self.input.width))

    def grid(self, rows: int, columns: int, box: Box) -> Plane:
        """The plane of a grid over a box."""
        box = Box(*map(float, box))
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
        if not real.numel():
            return []
        first, last = (torch.bucketize(torch.stack(torch.aminmax(real)), self._bases, right=True) - 1).tolist()
        if first == last:
            return [self._planes[first]]
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

    def bordered(self, codes: Tensor, reach: Sequence[int], stride: Sequence[int]) -> tuple[Plane | None, tuple[int, int]]:
        """Like `raster`, for a border that repeats cells of the plane, as mirrored padding does.

        Only if each window of `reach` cells, `stride` cells apart, reads nothing in the border but cells that it lies over.
        """
        planes = self.of(codes)
        if len(planes) != 1 or not planes[0].grid or bool((codes < 0).any()):
            return None, (0, 0)
        image, cell = self.split(codes, planes[0])
        columns = planes[0].grid[1]
        lines = cell[0, :, 0] // columns, cell[0, 0] % columns
        if bool((cell != lines[0][:, None] * columns + lines[1]).any()) or bool((image != image[:, :1, :1]).any()):
            return None, (0, 0)
        top, left = (_border(*side) for side in zip(lines, planes[0].grid, reach, stride, strict=True))
        return (None, (0, 0)) if top is None or left is None else (planes[0], (top, left))

    def merge(self, codes: Tensor, dim: int) -> Tensor | None:
        """Codes of the cells that arise when the cells along `dim` are merged, `(..., 1, ...)`.

        None if they make no grid: what is merged must be whole rectangles, all of one size and at even distances that leave no gap.
        """
        planes = self.of(codes)
        if len(planes) != 1 or not planes[0].grid or not codes.shape[dim]:
            return None
        plane, real = planes[0], codes >= 0
        some = real.any(dim, keepdim=True)
        image, cell = self.split(codes, plane)
        low, high = (image.masked_fill(~real, bad) for bad in (self.images, -1))
        image = low.amin(dim, keepdim=True)
        if bool(((image != high.amax(dim, keepdim=True)) & some).any()):
            return None
        ordered = cell.masked_fill(~real, -1).sort(dim).values
        distinct = ((ordered.diff(dim=dim) > 0) & (ordered.narrow(dim, 0, ordered.shape[dim] - 1) >= 0)).sum(
            dim, keepdim=True
        ) + 1
        columns = plane.grid[1]
        sides = []
        for part, length in ((cell // columns, plane.grid[0]), (cell % columns, columns)):
            first = part.masked_fill(~real, length).amin(dim, keepdim=True)[some]
            last = part.masked_fill(~real, -1).amax(dim, keepdim=True)[some]
            sides.append((first, last, length))
        area = (sides[0][1] - sides[0][0] + 1) * (sides[1][1] - sides[1][0] + 1)
        if bool((distinct[some] != area).any()):
            return None  # what is merged lies apart
        box = plane.box
        vertical = _merged(*sides[0], box.top, box.bottom)
        horizontal = _merged(*sides[1], box.left, box.right)
        if vertical is None or horizontal is None:
            return None
        lattice = self._lattice(vertical, horizontal)
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

    def thinned(self, plane: Plane, row: Tensor, column: Tensor) -> tuple[Plane, Tensor] | None:
        """The grid whose cells are these rows and columns of `plane`, and the cell of each; None if they make no grid."""
        box = plane.box
        vertical = _thinned(row, plane.grid[0], box.top, box.bottom)
        horizontal = _thinned(column, plane.grid[1], box.left, box.right)
        return None if vertical is None or horizontal is None else self._lattice(vertical, horizontal)

    def coarsened(self, codes: Tensor) -> Tensor:
        """Codes of which every second row and column of a plane are left, as those of the plane that these make."""
        grids = [plane for plane in self.of(codes) if plane.cells > 1]
        if len(grids) != 1:
            return codes
        plane = grids[0]
        here = (codes >= plane.base) & (codes < plane.base + plane.cells * self.images)
        image, cell = self.split(codes[here].long(), plane)
        if torch.unique(cell).numel() == plane.cells:
            return codes
        part = self.thinned(plane, cell // plane.grid[1], cell % plane.grid[1])
        if part is None:
            return codes
        made = codes.clone()
        made[here] = (part[0].base + image * part[0].cells + part[1]).to(codes.dtype)
        return made

    def _lattice(self, vertical: Side, horizontal: Side) -> tuple[Plane, Tensor] | None:
        (rows, r, top, bottom), (columns, c, left, right) = vertical, horizontal
        cell = r * columns + c
        if torch.unique(cell).numel() != rows * columns:
            return None
        return self.grid(rows, columns, Box(top, left, bottom, right)), cell

    def images_of(self, codes: Tensor) -> Tensor:
        """The image of each code; -1 for padding."""
        image = torch.full_like(codes, -1)
        for plane in self.of(codes):
            here = (codes >= plane.base) & (codes < plane.base + plane.cells * self.images)
            image = torch.where(here, (codes - plane.base) // plane.cells, image)
        return image

    def boxes(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Top and left, and bottom and right, of the cells of codes, `(..., 2)`; NaN for what is no cell."""
        low, high = (torch.full((*codes.shape, 2), torch.nan, dtype=torch.float64, device=codes.device) for _ in range(2))
        for plane in self.of(codes):
            if not plane.grid:
                continue
            here = (codes >= plane.base) & (codes < plane.base + plane.cells * self.images)
            _, cell = self.split(codes[here].long(), plane)
            place = torch.stack([cell // plane.grid[1], cell % plane.grid[1]], -1)
            size = torch.tensor(
                [plane.box.height / plane.grid[0], plane.box.width / plane.grid[1]], dtype=torch.float64, device=codes.device
            )
            start = torch.tensor([plane.box.top, plane.box.left], dtype=torch.float64, device=codes.device)
            low[here], high[here] = start + place * size, start + (place + 1) * size
        return low, high


Side = tuple[int, Tensor, float, float]  # number of cells along a side, the rank of each, and what they cover


def shared(first: float, step: float, count: int, start: float, stop: float) -> tuple[float, float]:
    """What `count` cells around points at distance `step` cover, the first of which is `first`.

    They get an even share of `[start, stop)` where that is true within half a cell, so that two ways to one grid, which differ in
    their padding, give the same.
    """
    share = (stop - start) / count
    slack = max(share, step) / 2 + _SLACK
    if abs(start + share / 2 - first) <= slack and abs(stop - share / 2 - (first + step * (count - 1))) <= slack:
        return start, stop
    return first - step / 2, first + step * (count - 0.5)


def _border(at: Tensor, length: int, reach: int, stride: int) -> int | None:
    """Lines before those of a plane, of `length`, among the lines `at`; None if a window reads others than it lies over."""
    own = torch.arange(length, device=at.device)
    begins = (at.unfold(0, length, 1) == own).all(1).nonzero().flatten() if len(at) >= length else own[:0]
    if not len(begins) or reach > len(at):
        return None
    before = int(begins[0])
    read = at.unfold(0, reach, stride)
    over = (torch.arange(len(at), device=at.device) - before).clamp(0, length - 1).unfold(0, reach, stride)
    inside = bool(((read.amin(1) >= over.amin(1)) & (read.amax(1) <= over.amax(1))).all())
    return before if inside else None


def _merged(first: Tensor, last: Tensor, length: int, start: float, stop: float) -> Side | None:
    """Of cells that reach from `first` to `last` along a side of `length`; those at its ends may be cut off by it."""
    size = int((last - first).max()) + 1
    begin = torch.where((last - first + 1 < size) & (first == 0), last + 1 - size, first)
    if bool(((last - first + 1 < size) & (first > 0) & (last < length - 1)).any()):
        return None
    values, rank = torch.unique(begin, return_inverse=True)
    steps = values.diff()
    step = int(steps[0]) if len(steps) else max(size, length)
    if len(steps) and (bool((steps != step).any()) or step > size):
        return None
    if not len(steps) and (first.min() > 0 or last.max() < length - 1):
        return None  # one window of several: it stands for itself alone
    scale = (stop - start) / length
    if step == size and int(values[0]) == 0:  # side by side: exactly what they saw; the last may be cut off
        return len(values), rank, start, start + size * len(values) * scale
    low, high = shared(start + (float(values[0]) + size / 2) * scale, step * scale, len(values), start, stop)
    return len(values), rank, low, high


def _thinned(at: Tensor, length: int, start: float, stop: float) -> Side | None:
    """Of cells at these positions of a side: all of a stretch, or every second, which stand for two each."""
    values, rank = torch.unique(at, return_inverse=True)
    count, first = len(values), int(values[0])
    scale = (stop - start) / length
    steps = values.diff()
    step = int(steps[0]) if count > 1 else 1
    if bool((steps != step).any()) or step > 2 or (count == 1 and length > 1):
        return None
    if step == 1:
        return count, rank, start + first * scale, start + (first + count) * scale
    if first > 1 or first + step * count < length:
        return None
    return count, rank, start, start + min(first // 2 * 2 + step * count, length) * scale
