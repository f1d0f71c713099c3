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

from visattn.core.capturing.tokens.lines import Side, border, merged, spread, thinned
from visattn.core.geometry import Box

PADDING = -1


def compact(codes: Tensor) -> Tensor:
    """Return codes whose expanded axes (stride 0), along which all are the same, have size 1."""
    for dim, (stride, size) in enumerate(zip(codes.stride(), codes.shape, strict=True)):
        if stride == 0 and size > 1:
            codes = codes.narrow(dim, 0, 1)
    return codes


def _expanded(codes: Tensor, shape: torch.Size) -> Tensor:
    """Return codes expanded to a shape, or beyond it along axes where they are larger."""
    return codes.expand([max(own_size, size) for own_size, size in zip(codes.shape, shape, strict=True)])


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
        if not codes.numel():
            return False
        first_code = codes.flatten()[0] if codes.is_contiguous() else codes[(0,) * codes.ndim]
        return int(first_code) < self.codes


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
        """Return the plane (a grid of numbered cells) over a box of the image; create it if it is new.

        Grids of video clips have an axis of frames.
        """
        box = Box(*map(float, box))
        grid = (frames, rows, columns) if self.frames else (rows, columns)
        key = *grid, tuple(round(side, 3) for side in box)
        return self._known.get(key) or self._add(key, grid, box, "")

    def set_of(self, name: str, count: int = 1) -> Plane:
        """Return the plane of a set (`count` tokens that lie nowhere in the image, such as words); create it if it is new."""
        return self._known.get((name, count)) or self._add((name, count), (), self.input, name, count)

    def choice(self, picked: Tensor) -> tuple[int, Plane]:
        """Return number and set of tokens that were picked by content, `(B, N)`: the same for the same tokens."""
        same = [number for number, known in enumerate(self.choices) if known.shape == picked.shape and torch.equal(known, picked)]
        number = same[0] if same else len(self.choices)
        if not same:
            self.choices.append(picked)
        return number, self.set_of(f"query#{number}", picked.shape[1])

    def _add(self, key: object, grid: tuple[int, ...], box: Box, name: str, count: int = 1) -> Plane:
        """Create a plane, whose codes follow those of all earlier planes, and remember it under `key`."""
        start = self._planes[-1].base + self._planes[-1].cells * self.images if self._planes else 0
        plane = self._known[key] = Plane(start if grid else start + count, grid, box, name, count)
        self._planes.append(plane)
        self._starts.append(plane.start)
        return plane

    def number(self, plane: Plane, code: int) -> int:
        """Return the number of a token in its set, from its position code.

        Words that one table gave in several calls are several sets, such as `word#0` and `word#1`. They are numbered on.
        """
        table = plane.name.rpartition("#")[0]
        earlier_planes = self._planes[: self._planes.index(plane)] if table else []
        earlier_counts = {
            earlier.name: earlier.count
            for earlier in earlier_planes
            if earlier.name.rpartition("#")[0] == table and earlier.name != plane.name
        }
        return sum(earlier_counts.values()) + (code - plane.base) % plane.count

    def members(self, plane: Plane) -> Tensor:
        """Return the codes of the members of a set before they meet an image, `(count,)`; a single image they meet at once."""
        start = plane.base if self.images == 1 else plane.start
        return torch.arange(start, start + plane.count, dtype=torch.int32, device=self.device)

    def given(self, codes: Tensor, image: Tensor | int) -> Tensor:
        """Return position codes in which each token of a set, such as a query, that had met no image belongs to `image`."""
        stored = compact(codes)
        for plane in self.sets(stored):
            is_free = (stored >= plane.start) & (stored < plane.base)  # has met no image
            stored = torch.where(is_free, stored + (1 + image) * plane.count, stored).to(torch.int32)
        return _expanded(stored, codes.shape)

    def met(self, codes: Tensor, others: Tensor) -> Tensor:
        """Return position codes in which each token of a set that had met no image gets the image of the same token in `others`."""
        stored, other_codes = compact(codes), compact(others)
        for plane in self.sets(stored):
            other_has_image = (other_codes >= plane.base) & (other_codes < plane.base + plane.cells * self.images)
            is_same_token = (other_codes - plane.base) % plane.count == stored - plane.start
            is_free = stored < plane.base
            stored = torch.where(other_has_image & is_same_token & is_free, other_codes, stored)
        return _expanded(stored, codes.shape)

    def without_images(self, codes: Tensor) -> Tensor:
        """Return position codes in which no token of a set has met an image."""
        stored = compact(codes)
        for plane in self.sets(stored):
            belongs = (stored >= plane.start) & (stored < plane.base + plane.cells * self.images)
            stored = torch.where(belongs, plane.start + (stored - plane.start) % plane.count, stored).to(torch.int32)
        return _expanded(stored, codes.shape)

    def sets(self, codes: Tensor) -> list[Plane]:
        """Return the sets with members, among these codes, that may have met no image yet; none for a single image."""
        if self.images == 1 or all(plane.grid for plane in self._planes):
            return []
        return [plane for plane in self.of(codes) if not plane.grid]

    def apart(self, codes: Tensor, rows: int) -> Tensor:
        """Return codes of one image in which each occurrence of a token that lies nowhere, as a class token, is a token of its own.

        Models that run on tiles or frames apart have a class token in each; some repeat a learned token at the end of each line.

        Args:
            codes: Position codes `(blocks, queries + keys)`.
            rows: Number of queries.
        """
        for plane in self.of(codes):
            if plane.grid:
                continue
            belongs = (codes >= plane.base) & (codes < plane.base + plane.count)
            occurrence = torch.cat([_occurrence(codes[:, :rows]), _occurrence(codes[:, rows:])], 1)
            times = int(occurrence[belongs].max()) + 1
            is_in_several_blocks = int(belongs.any(1).sum()) > 1
            if times == 1 and not is_in_several_blocks:
                continue
            blocks = len(codes) if is_in_several_blocks else 1
            block = torch.arange(blocks, device=codes.device)[:, None]
            new_plane = self.set_of(plane.name, plane.count * times * blocks)
            new_number = ((codes - plane.base) * blocks + block) * times + occurrence
            codes = torch.where(belongs, new_plane.base + new_number, codes)
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
        lowest, highest = (int(code) for code in torch.aminmax(codes))
        if lowest < 0:
            codes = codes[codes >= 0]
            if not codes.numel():
                return []
            lowest = int(codes.amin())
        first, last = (bisect_right(self._starts, code) - 1 for code in (lowest, highest))
        if first == last:
            return [self._planes[first]]
        plane_numbers = torch.unique(self.numbers(codes))
        return [self._planes[number] for number in plane_numbers.tolist()]

    def numbers(self, codes: Tensor) -> Tensor:
        """Return the number of the plane of each code, in the order of creation."""
        return torch.bucketize(codes.contiguous(), torch.tensor(self._starts, device=self.device), right=True) - 1

    def raster(self, codes: Tensor) -> tuple[Plane | None, tuple[int, int]]:
        """Return the plane that `(groups, rows, columns)` codes cover completely, in raster order in each group; None if there is none.

        The plane may be surrounded by padding. The second result is the number of padding rows and columns before the plane.
        """
        no_plane = None, (0, 0)
        is_cell = codes[0] >= 0
        used_rows, used_columns = is_cell.any(1).nonzero().flatten(), is_cell.any(0).nonzero().flatten()
        if not len(used_rows) or not len(used_columns):
            return no_plane
        top, left = int(used_rows[0]), int(used_columns[0])
        inner = codes[:, top : int(used_rows[-1]) + 1, left : int(used_columns[-1]) + 1]  # without the padding around it
        planes = self.of(inner[0])
        if len(planes) != 1 or planes[0].grid[-2:] != tuple(inner.shape[1:]) or bool((inner < 0).any()):
            return no_plane
        plane = planes[0]
        frame, cell = self.split(inner, plane)
        is_in_order = bool((cell == torch.arange(plane.area, device=self.device).view_as(inner[0])).all())
        is_one_frame = is_in_order and bool((frame == frame[:, :1, :1]).all())
        return (plane if is_one_frame else None), (top, left)

    def bordered(self, codes: Tensor, reach: Sequence[int], stride: Sequence[int]) -> tuple[Plane | None, tuple[int, int]]:
        """Find a plane as `raster` does, but with a border that repeats cells of the plane, as reflection padding does.

        The plane is None unless each window of `reach` cells at stride `stride` reads in the border only cells that it covers anyway.
        """
        no_plane = None, (0, 0)
        planes = self.of(codes)
        if len(planes) != 1 or not planes[0].grid or bool((codes < 0).any()):
            return no_plane
        plane = planes[0]
        image, cell = self.split(codes, plane)
        row, column = cell[0, :, 0] // plane.columns, cell[0, 0] % plane.columns
        is_lattice = not bool((cell != row[:, None] * plane.columns + column).any())  # each line repeats one line of the plane
        if not is_lattice or bool((image != image[:, :1, :1]).any()):
            return no_plane
        top = border(row, plane.grid[-2], reach[0], stride[0])
        left = border(column, plane.columns, reach[1], stride[1])
        return no_plane if top is None or left is None else (plane, (top, left))

    def merge(self, codes: Tensor, dim: int) -> Tensor | None:
        """Return the position codes of the cells that result from merging cells along an axis, as by pooling, `(..., 1, ...)`.

        Return None if these form no grid: merged cells must be full rectangles of one size, evenly spaced and without gaps. Cells that
        are spread evenly over the whole plane, such as every second row and column, become one cell that covers it.
        """
        planes = self.of(codes)
        if len(planes) != 1 or not planes[0].grid or not codes.shape[dim]:
            return None
        plane, codes = planes[0], _without_repeats(codes, dim)
        is_cell = codes >= 0
        has_cells = is_cell.any(dim, keepdim=True)
        local = codes - plane.base
        image, cell = local // plane.cells, local % plane.cells
        image, highest_image = _lowest_and_highest(image, is_cell, dim, self.images)
        if bool(((image != highest_image) & has_cells).any()):  # cells of several images
            return None
        row, column = cell % plane.area // plane.columns, cell % plane.columns
        sides, cells_of_box = [], torch.ones((), dtype=torch.int64, device=self.device)
        for index, length in ((cell // plane.area, plane.frames), (row, plane.grid[-2]), (column, plane.columns)):
            lowest, highest = _lowest_and_highest(index, is_cell, dim, length)
            first, last = lowest[has_cells], highest[has_cells]
            sides.append((first, last, length))
            cells_of_box = cells_of_box * (last - first + 1)
        fills_box = not bool((_count_distinct(cell, is_cell, dim)[has_cells] != cells_of_box).any())
        if not fills_box:
            is_spread = plane.frames == 1 and bool(is_cell.all()) and spread(cell, dim, plane.grid[-2], plane.columns)
            return self.grid(1, 1, plane.box).base + image if is_spread else None
        box, all_frames = plane.box, (0.0, float(plane.frames))
        temporal = merged(*sides[0], *all_frames)
        vertical, horizontal = merged(*sides[1], box.top, box.bottom), merged(*sides[2], box.left, box.right)
        if temporal is None or vertical is None or horizontal is None or temporal[2:] != all_frames:
            return None
        new_grid = self._lattice(temporal, vertical, horizontal)
        if new_grid is None:
            return None
        new_plane, new_cell = new_grid
        new_codes = torch.full_like(image, PADDING)  # stays where only padding is merged
        new_codes[has_cells] = (new_plane.base + image[has_cells] * new_plane.cells + new_cell).to(new_codes.dtype)
        return new_codes

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
        belongs = (codes >= plane.base) & (codes < plane.base + plane.cells * self.images)
        local = codes[belongs].long() - plane.base
        image, cell = local // plane.cells, local % plane.cells
        if torch.unique(cell).numel() == plane.cells:
            return codes
        coarse = self.thinned(plane, cell)
        if coarse is None:
            return codes
        coarse_plane, coarse_cell = coarse
        new_codes = codes.clone()
        new_codes[belongs] = (coarse_plane.base + image * coarse_plane.cells + coarse_cell).to(codes.dtype)
        return new_codes

    def _lattice(self, temporal: Side, vertical: Side, horizontal: Side) -> tuple[Plane, Tensor] | None:
        """Return the grid with these frames, rows and columns, and the cell of each element; None if a cell stays empty."""
        frames, frame, *_ = temporal
        rows, row, top, bottom = vertical
        columns, column, left, right = horizontal
        cell = (frame * rows + row) * columns + column
        if torch.unique(cell).numel() != frames * rows * columns:
            return None
        return self.grid(rows, columns, Box(top, left, bottom, right), frames), cell

    def images_of(self, codes: Tensor) -> Tensor:
        """Return the image index of each code; -1 for padding, and for members of a set that have met no image."""
        image = torch.full_like(codes, -1)
        for plane in self.of(codes):
            belongs = (codes >= plane.base) & (codes < plane.base + plane.cells * self.images)
            image = torch.where(belongs, (codes - plane.base) // plane.cells, image)
        return image

    def times(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return begin and end of the cells of codes as shares of the clip; NaN for codes without a cell."""
        begin, end = (torch.full(codes.shape, torch.nan, dtype=torch.float64, device=codes.device) for _ in range(2))
        for plane in self.of(codes):
            belongs = (codes >= plane.base) & (codes < plane.base + plane.cells * self.images)
            if plane.grid:
                frame = (codes[belongs].double() - plane.base) // plane.area % plane.frames
                begin[belongs], end[belongs] = frame / plane.frames, (frame + 1) / plane.frames
        return begin, end

    def boxes(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the top left and the bottom right corners of the cells of codes, each `(..., 2)`; NaN for codes without a cell."""
        low, high = (torch.full((*codes.shape, 2), torch.nan, dtype=torch.float64, device=codes.device) for _ in range(2))
        for plane in self.of(codes):
            if not plane.grid:
                continue
            belongs = (codes >= plane.base) & (codes < plane.base + plane.cells * self.images)
            _, cell = self.split(codes[belongs].long(), plane)
            row_and_column = torch.stack([cell // plane.columns, cell % plane.columns], -1)
            height, width = plane.box.height / plane.grid[-2], plane.box.width / plane.columns
            cell_size = torch.tensor([height, width], dtype=torch.float64, device=codes.device)
            origin = torch.tensor([plane.box.top, plane.box.left], dtype=torch.float64, device=codes.device)
            low[belongs], high[belongs] = origin + row_and_column * cell_size, origin + (row_and_column + 1) * cell_size
        return low, high


def _lowest_and_highest(values: Tensor, is_cell: Tensor, dim: int, above: int) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest value along an axis, without those of padding; no value is as large as `above`."""
    lowest = values.masked_fill(~is_cell, above).amin(dim, keepdim=True)
    return lowest, values.masked_fill(~is_cell, -1).amax(dim, keepdim=True)


def _count_distinct(cell: Tensor, is_cell: Tensor, dim: int) -> Tensor:
    """Count the distinct cells along an axis, without padding."""
    ordered = cell.masked_fill(~is_cell, -1).sort(dim).values
    is_next_larger = ordered.diff(dim=dim) > 0
    is_no_padding = ordered.narrow(dim, 0, ordered.shape[dim] - 1) >= 0
    return (is_next_larger & is_no_padding).sum(dim, keepdim=True) + 1


def _occurrence(codes: Tensor) -> Tensor:
    """Count, for each code in `(blocks, tokens)`, the equal codes before it in its block."""
    order = codes.argsort(dim=1, stable=True)
    ordered, rank = codes.gather(1, order), torch.arange(codes.shape[1], device=codes.device).expand(codes.shape)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    rank_of_first = rank.where(is_first, 0).cummax(1).values if codes.shape[1] else rank
    return torch.zeros_like(rank).scatter(1, order, rank - rank_of_first)


def _without_repeats(codes: Tensor, dim: int) -> Tensor:
    """Drop the entries along `dim` that repeat the entry before them, such as the channels of one token."""
    differs_from_next = (compact(codes).diff(dim=dim) != 0).movedim(dim, -1).flatten(0, -2).any(0)
    changes = differs_from_next.nonzero().flatten()
    return codes.index_select(dim, torch.cat([changes.new_zeros(1), changes + 1]))
