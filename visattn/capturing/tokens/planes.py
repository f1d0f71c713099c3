"""Position codes: in a forward pass, each cell of each token grid has its own integer, for each image of the batch.

A *plane* is a grid over the model's input: the pixels, the patches, or the pooled patches of a stage. A *set* is a plane without a grid:
a class token, registers, object queries, words. Two ways to compute one grid give the same plane, so the same tokens always have the
same codes. Members of a set that no image has reached yet, such as object queries, have codes of their own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from visattn.capturing.tokens.lines import Side, border, merged, spread, thinned
from visattn.geometry import Box

PADDING = -1


def compact(codes: Tensor) -> Tensor:
    """Shrink expanded axes (stride 0) to size 1."""
    for dim, (stride, size) in enumerate(zip(codes.stride(), codes.shape, strict=True)):
        if stride == 0 and size > 1:
            codes = codes.narrow(dim, 0, 1)
    return codes


def _expanded(codes: Tensor, shape: torch.Size) -> Tensor:
    """Expand codes to a shape, or beyond it where they are larger."""
    return codes.expand([max(side, other) for side, other in zip(codes.shape, shape, strict=True)])


@dataclass(frozen=True)
class Plane:
    """Grid or set whose codes are `base + image * cells + cell`; the cells of a grid are in raster order, frame by frame.

    A set also has the codes `start` to `base`, for its members before they meet an image.
    """

    base: int
    grid: tuple[int, ...]  # (rows, columns) or (frames, rows, columns); () for a set
    box: Box
    name: str = ""
    count: int = 1  # members of a set

    @property
    def cells(self) -> int:
        """Number of cells or members."""
        return math.prod(self.grid) if self.grid else self.count

    @property
    def frames(self) -> int:
        """Number of frames; 1 for an image."""
        return self.grid[0] if len(self.grid) == 3 else 1

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.grid[-1]

    @property
    def area(self) -> int:
        """Number of cells of a frame, or of members."""
        return self.cells // self.frames

    @property
    def start(self) -> int:
        """First code."""
        return self.base if self.grid else self.base - self.count


class Pixels(NamedTuple):
    """Plane of the pixels, which is the first; `codes` is the number of its codes."""

    codes: int

    def holds(self, codes: Tensor) -> bool:
        """Check whether codes belong to this plane; only the first code is read."""
        return bool(codes.numel()) and int(codes.flatten()[0] if codes.is_contiguous() else codes[(0,) * codes.ndim]) < self.codes


class Planes:
    """All planes of a forward pass."""

    def __init__(self, images: int, input_size: tuple[int, int], device: torch.device, frames: int = 0) -> None:
        """Start without planes; `frames` is 0 for single images."""
        self.images, self.input, self.device, self.frames = images, Box(0, 0, *input_size), device, frames
        self._planes: list[Plane] = []
        self._known: dict[object, Plane] = {}
        self._starts: list[int] = []
        self.choices: list[Tensor] = []

    @property
    def pixels(self) -> Pixels:
        """Plane of the pixels."""
        return Pixels(self.images * max(self.frames, 1) * int(self.input.height) * int(self.input.width))

    def grid(self, rows: int, columns: int, box: Box, frames: int = 1) -> Plane:
        """Return the plane of a grid over a box; create it if it is new. Grids of clips have an axis of frames."""
        box = Box(*map(float, box))
        grid = (frames, rows, columns) if self.frames else (rows, columns)
        key = *grid, tuple(round(side, 3) for side in box)
        return self._known.get(key) or self._add(key, grid, box, "")

    def set_of(self, name: str, count: int = 1) -> Plane:
        """Return the plane of a set; create it if it is new."""
        return self._known.get((name, count)) or self._add((name, count), (), self.input, name, count)

    def choice(self, picked: Tensor) -> tuple[int, Plane]:
        """Return number and set of tokens that were picked by content, `(B, N)`: the same for the same tokens."""
        number = next(
            (at for at, one in enumerate(self.choices) if one.shape == picked.shape and torch.equal(one, picked)),
            len(self.choices),
        )
        if number == len(self.choices):
            self.choices.append(picked)
        return number, self.set_of(f"query#{number}", picked.shape[1])

    def _add(self, key: object, grid: tuple[int, ...], box: Box, name: str, count: int = 1) -> Plane:
        start = self._planes[-1].base + self._planes[-1].cells * self.images if self._planes else 0
        plane = self._known[key] = Plane(start if grid else start + count, grid, box, name, count)
        self._planes.append(plane)
        self._starts.append(plane.start)
        return plane

    def number(self, plane: Plane, code: int) -> int:
        """Return the number of a member in its set. Sets that one table gave at several times are numbered on."""
        table = plane.name.rpartition("#")[0]
        earlier = self._planes[: self._planes.index(plane)] if table else []
        sets = {
            known.name: known.count for known in earlier if known.name.rpartition("#")[0] == table and known.name != plane.name
        }
        return sum(sets.values()) + (code - plane.base) % plane.count

    def members(self, plane: Plane) -> Tensor:
        """Return the codes of the members of a set before they meet an image, `(count,)`; a single image they meet at once."""
        start = plane.base if self.images == 1 else plane.start
        return torch.arange(start, start + plane.count, dtype=torch.int32, device=self.device)

    def given(self, codes: Tensor, image: Tensor | int) -> Tensor:
        """Return codes in which each member that had met no image belongs to `image`."""
        stored = compact(codes)
        for plane in self.sets(stored):
            here = (stored >= plane.start) & (stored < plane.base)
            stored = torch.where(here, stored + (1 + image) * plane.count, stored).to(torch.int32)
        return _expanded(stored, codes.shape)

    def met(self, codes: Tensor, others: Tensor) -> Tensor:
        """Return codes in which each member that had met no image belongs to the image of the same member in `others`."""
        stored, other = compact(codes), compact(others)
        for plane in self.sets(stored):
            same = (other >= plane.base) & (other < plane.base + plane.cells * self.images)
            same = same & ((other - plane.base) % plane.count == stored - plane.start)
            stored = torch.where(same & (stored < plane.base), other, stored)
        return _expanded(stored, codes.shape)

    def sets(self, codes: Tensor) -> list[Plane]:
        """Return the sets with members, among these codes, that may have met no image yet; none for a single image."""
        if self.images == 1 or all(plane.grid for plane in self._planes):
            return []
        return [plane for plane in self.of(codes) if not plane.grid]

    def apart(self, codes: Tensor, rows: int) -> Tensor:
        """Return codes `(blocks, rows + columns)` of one image in which each occurrence of a member of a set is a token of its own.

        Models that run on tiles or frames apart have a class token in each; some repeat a learned token at the end of each line.
        """
        blocks = len(codes)
        for plane in self.of(codes):
            if plane.grid:
                continue
            here = (codes >= plane.base) & (codes < plane.base + plane.count)
            number = torch.cat([_occurrence(part) for part in (codes[:, :rows], codes[:, rows:])], 1)
            times, across = int(number[here].max()) + 1, int(here.any(1).sum()) > 1
            if times == 1 and not across:
                continue
            block = torch.arange(blocks, device=codes.device)[:, None] if across else torch.zeros_like(codes)
            new = self.set_of(plane.name, plane.count * times * (blocks if across else 1))
            own = ((codes - plane.base) * (blocks if across else 1) + block) * times + number
            codes = torch.where(here, new.base + own, codes)
        return codes

    def codes(self, plane: Plane) -> Tensor:
        """Return all codes of a plane, `(images, *grid)`, or `(images, count)` for a set."""
        shape = plane.grid or (plane.count,)
        count = self.images * plane.cells
        return torch.arange(plane.base, plane.base + count, dtype=torch.int32, device=self.device).view(self.images, *shape)

    def of(self, codes: Tensor) -> list[Plane]:
        """Return the planes that codes belong to, in the order of their creation; padding belongs to none."""
        codes = compact(codes)
        if not codes.numel():
            return []
        low, high = (int(end) for end in torch.aminmax(codes))
        if low < 0:
            codes = codes[codes >= 0]
            if not codes.numel():
                return []
            low = int(codes.amin())
        first, last = (bisect_right(self._starts, end) - 1 for end in (low, high))
        if first == last:
            return [self._planes[first]]
        met = torch.unique(self.numbers(codes))
        return [self._planes[i] for i in met.tolist()]

    def numbers(self, codes: Tensor) -> Tensor:
        """Return the number of the plane of each code, in the order of creation."""
        return torch.bucketize(codes.contiguous(), torch.tensor(self._starts, device=self.device), right=True) - 1

    def raster(self, codes: Tensor) -> tuple[Plane | None, tuple[int, int]]:
        """Return the plane that `(groups, rows, columns)` codes cover completely, in raster order in each group; None if there is none.

        The plane may be surrounded by padding. The second result is the number of padding rows and columns before the plane.
        """
        real = codes[0] >= 0
        inside = [real.any(dim).nonzero().flatten() for dim in (1, 0)]
        if not all(len(side) for side in inside):
            return None, (0, 0)
        (top, bottom), (left, right) = ((int(side[0]), int(side[-1]) + 1) for side in inside)
        whole = codes[:, top:bottom, left:right]
        planes = self.of(whole[0])
        if len(planes) != 1 or planes[0].grid[-2:] != tuple(whole.shape[1:]) or bool((whole < 0).any()):
            return None, (0, 0)
        frame, cell = self.split(whole, planes[0])
        fits = bool((cell == torch.arange(planes[0].area, device=self.device).view_as(whole[0])).all())
        fits = fits and bool((frame == frame[:, :1, :1]).all())
        return (planes[0] if fits else None), (top, left)

    def bordered(self, codes: Tensor, reach: Sequence[int], stride: Sequence[int]) -> tuple[Plane | None, tuple[int, int]]:
        """Find a plane as `raster` does, but with a border that repeats cells of the plane, as reflection padding does.

        The plane is None unless each window of `reach` cells at stride `stride` reads in the border only cells that it covers anyway.
        """
        planes = self.of(codes)
        if len(planes) != 1 or not planes[0].grid or bool((codes < 0).any()):
            return None, (0, 0)
        image, cell = self.split(codes, planes[0])
        columns = planes[0].columns
        lines = cell[0, :, 0] // columns, cell[0, 0] % columns
        if bool((cell != lines[0][:, None] * columns + lines[1]).any()) or bool((image != image[:, :1, :1]).any()):
            return None, (0, 0)
        top, left = (border(*side) for side in zip(lines, planes[0].grid[-2:], reach, stride, strict=True))
        return (None, (0, 0)) if top is None or left is None else (planes[0], (top, left))

    def merge(self, codes: Tensor, dim: int) -> Tensor | None:
        """Return the codes of the cells that result from merging cells along `dim`, `(..., 1, ...)`.

        Return None if these form no grid: merged cells must be full rectangles of one size, evenly spaced and without gaps. Cells that
        are spread evenly over the whole plane, such as every second row and column, become one cell that covers it.
        """
        planes = self.of(codes)
        if len(planes) != 1 or not planes[0].grid or not codes.shape[dim]:
            return None
        codes = _without_repeats(codes, dim)
        plane, real = planes[0], codes >= 0
        some = real.any(dim, keepdim=True)
        local = codes - plane.base
        image, cell = local // plane.cells, local % plane.cells
        low, high = (image.masked_fill(~real, bad) for bad in (self.images, -1))
        image = low.amin(dim, keepdim=True)
        if bool(((image != high.amax(dim, keepdim=True)) & some).any()):
            return None
        ordered = cell.masked_fill(~real, -1).sort(dim).values
        distinct = ((ordered.diff(dim=dim) > 0) & (ordered.narrow(dim, 0, ordered.shape[dim] - 1) >= 0)).sum(
            dim, keepdim=True
        ) + 1
        sides = []
        filled = torch.ones((), dtype=torch.int64, device=self.device)
        at = (cell // plane.area, cell % plane.area // plane.columns, cell % plane.columns)
        for part, length in zip(at, (plane.frames, *plane.grid[-2:]), strict=True):
            first = part.masked_fill(~real, length).amin(dim, keepdim=True)[some]
            last = part.masked_fill(~real, -1).amax(dim, keepdim=True)[some]
            sides.append((first, last, length))
            filled = filled * (last - first + 1)
        if bool((distinct[some] != filled).any()):  # the merged cells do not fill a rectangle
            whole = plane.frames == 1 and bool(real.all()) and spread(cell, dim, plane.grid[-2], plane.columns)
            return self.grid(1, 1, plane.box).base + image if whole else None
        box = plane.box
        ends = (0.0, float(plane.frames)), (box.top, box.bottom), (box.left, box.right)
        parts = [merged(*side, *end) for side, end in zip(sides, ends, strict=True)]
        if None in parts or parts[0][2:] != ends[0]:  # type: ignore[index]
            return None
        lattice = self._lattice(*parts)  # type: ignore[arg-type]
        if lattice is None:
            return None
        new, cell = lattice
        made = torch.full_like(image, PADDING)  # stays where only padding is merged
        made[some] = (new.base + image[some] * new.cells + cell).to(made.dtype)
        return made

    def on_grid(self, codes: Tensor) -> bool:
        """Check whether some codes belong to a grid."""
        return any(plane.grid for plane in self.of(codes))

    def split(self, codes: Tensor, plane: Plane) -> tuple[Tensor, Tensor]:
        """Split the codes of one plane into image and cell; for clips into frame, counted over all clips, and cell of the frame."""
        local = codes - plane.base
        return local // plane.area, local % plane.area

    def thinned(self, plane: Plane, cell: Tensor) -> tuple[Plane, Tensor] | None:
        """Return the grid that these cells of `plane` form with even gaps, and the cell of each in it; None if they form no grid."""
        box, frame = plane.box, cell // plane.area
        vertical = thinned(cell % plane.area // plane.columns, plane.grid[-2], box.top, box.bottom)
        horizontal = thinned(cell % plane.columns, plane.columns, box.left, box.right)
        if vertical is None or horizontal is None or len(torch.unique(frame)) < plane.frames:
            return None
        return self._lattice((plane.frames, frame, 0.0, 0.0), vertical, horizontal)

    def coarsened(self, codes: Tensor) -> Tensor:
        """Convert codes of every second row and column of a plane to the coarser plane that these form; return other codes unchanged."""
        grids = [plane for plane in self.of(codes) if plane.grid and plane.cells > 1]
        if len(grids) != 1:
            return codes
        plane = grids[0]
        here = (codes >= plane.base) & (codes < plane.base + plane.cells * self.images)
        local = codes[here].long() - plane.base
        image, cell = local // plane.cells, local % plane.cells
        if torch.unique(cell).numel() == plane.cells:
            return codes
        part = self.thinned(plane, cell)
        if part is None:
            return codes
        made = codes.clone()
        made[here] = (part[0].base + image * part[0].cells + part[1]).to(codes.dtype)
        return made

    def _lattice(self, temporal: Side, vertical: Side, horizontal: Side) -> tuple[Plane, Tensor] | None:
        (frames, f, *_), (rows, r, top, bottom), (columns, c, left, right) = temporal, vertical, horizontal
        cell = (f * rows + r) * columns + c
        if torch.unique(cell).numel() != frames * rows * columns:
            return None
        return self.grid(rows, columns, Box(top, left, bottom, right), frames), cell

    def images_of(self, codes: Tensor) -> Tensor:
        """Return the image index of each code; -1 for padding, and for members of a set that have met no image."""
        image = torch.full_like(codes, -1)
        for plane in self.of(codes):
            here = (codes >= plane.base) & (codes < plane.base + plane.cells * self.images)
            image = torch.where(here, (codes - plane.base) // plane.cells, image)
        return image

    def times(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return begin and end of the cells of codes as shares of the clip; NaN for codes without a cell."""
        low, high = (torch.full(codes.shape, torch.nan, dtype=torch.float64, device=codes.device) for _ in range(2))
        for plane in self.of(codes):
            here = (codes >= plane.base) & (codes < plane.base + plane.cells * self.images)
            if plane.grid:
                frame = (codes[here].double() - plane.base) // plane.area % plane.frames
                low[here], high[here] = frame / plane.frames, (frame + 1) / plane.frames
        return low, high

    def boxes(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the top left and the bottom right corners of the cells of codes, each `(..., 2)`; NaN for codes without a cell."""
        low, high = (torch.full((*codes.shape, 2), torch.nan, dtype=torch.float64, device=codes.device) for _ in range(2))
        for plane in self.of(codes):
            if not plane.grid:
                continue
            here = (codes >= plane.base) & (codes < plane.base + plane.cells * self.images)
            _, cell = self.split(codes[here].long(), plane)
            place = torch.stack([cell // plane.columns, cell % plane.columns], -1)
            sides = [plane.box.height / plane.grid[-2], plane.box.width / plane.columns]
            size = torch.tensor(sides, dtype=torch.float64, device=codes.device)
            start = torch.tensor([plane.box.top, plane.box.left], dtype=torch.float64, device=codes.device)
            low[here], high[here] = start + place * size, start + (place + 1) * size
        return low, high


def _occurrence(codes: Tensor) -> Tensor:
    """Count, for each code in `(blocks, tokens)`, the equal codes before it in its block."""
    order = codes.argsort(dim=1, stable=True)
    values, at = codes.gather(1, order), torch.arange(codes.shape[1], device=codes.device).expand(codes.shape)
    begins = torch.ones_like(values, dtype=torch.bool)
    begins[:, 1:] = values[:, 1:] != values[:, :-1]
    start = at.where(begins, 0).cummax(1).values if codes.shape[1] else at
    return torch.zeros_like(at).scatter(1, order, at - start)


def _without_repeats(codes: Tensor, dim: int) -> Tensor:
    """Drop the entries along `dim` that repeat the entry before them, such as the channels of one token."""
    changes = (compact(codes).diff(dim=dim) != 0).movedim(dim, -1).flatten(0, -2).any(0).nonzero().flatten()
    return codes.index_select(dim, torch.cat([changes.new_zeros(1), changes + 1]))
