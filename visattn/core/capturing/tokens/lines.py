"""Rows and columns of a grid that an operation reads, merges or picks, and what the cells that result cover."""

from __future__ import annotations

import torch
from torch import Tensor

_SLACK = 1e-6
Side = tuple[int, Tensor, float, float]  # number of cells along a side, index of each, start and end of what they cover


def shared(first: float, step: float, count: int, start: float, stop: float) -> tuple[float, float]:
    """Return start and end of the range that `count` cells cover, with centers at `first`, `first + step`, ...

    If an even division of `[start, stop)` matches these centers within half a cell, the cells cover that range. Two ways to compute one
    grid that differ only in their padding thus give the same plane.
    """
    even_size = (stop - start) / count
    slack = max(even_size, step) / 2 + _SLACK
    last = first + step * (count - 1)
    if abs(start + even_size / 2 - first) <= slack and abs(stop - even_size / 2 - last) <= slack:
        return start, stop
    return first - step / 2, first + step * (count - 0.5)


def border(at: Tensor, length: int, reach: int, stride: int) -> int | None:
    """Count the lines (rows, or columns) that padding by reflection or repetition has put before a plane of `length` lines.

    Return None if a window reads lines that it does not cover, or one outside of its own cell more often than all lines in it.

    Args:
        at: Number in the plane of each padded line, such as 2, 1, 0, 1, 2, 3, ...
        length: Number of lines of the plane.
        reach: Lines that a window reads.
        stride: Distance of two windows.
    """
    lines = torch.arange(length, device=at.device)
    starts = (at.unfold(0, length, 1) == lines).all(1).nonzero().flatten() if len(at) >= length else lines[:0]
    if not len(starts) or reach > len(at):
        return None
    before = int(starts[0])
    read = at.unfold(0, reach, stride)  # (windows, reach)
    covered = (torch.arange(len(at), device=at.device) - before).clamp(0, length - 1).unfold(0, reach, stride)
    reads_covered = bool(((read.amin(1) >= covered.amin(1)) & (read.amax(1) <= covered.amax(1))).all())
    centers = torch.arange(len(read), device=at.device) * stride - before + (reach - 1) / 2
    times_read = (read[:, :, None] == read[:, None]).sum(2)  # how often a window reads the same line
    is_in_own_cell = (read - centers[:, None]).abs() <= max(stride, 1) / 2
    reads_own_most = reads_covered and bool(((times_read * is_in_own_cell).amax(1) == times_read.amax(1)).all())
    return before if reads_own_most else None


def merged(first: Tensor, last: Tensor, length: int, start: float, stop: float) -> Side | None:
    """Return the rows, or columns, of merged cells, such as pooled ones; None if they are not of one size, or not evenly spaced.

    Args:
        first: First line (row or column) that each merged cell reads.
        last: Last line that it reads. Cells at the ends of the side may be cut off.
        length: Number of lines of the old grid.
        start: Start of what these lines cover.
        stop: End of what they cover.
    """
    size = int((last - first).max()) + 1
    is_cut_off = last - first + 1 < size
    if bool((is_cut_off & (first > 0) & (last < length - 1)).any()):
        return None
    begin = torch.where(is_cut_off & (first == 0), last + 1 - size, first)
    begins, rank = torch.unique(begin, return_inverse=True)
    count, steps = len(begins), begins.diff()
    step = int(steps[0]) if len(steps) else max(size, length)
    if count > 1 and (bool((steps != step).any()) or step > size):
        return None
    if count <= 1 and (first.min() > 0 or last.max() < length - 1):
        return None  # one window of several: it forms no grid on its own
    line_size = (stop - start) / length
    if step == size and int(begins[0]) == 0:  # no overlap: exactly the cells that were read; the last may be cut off
        return count, rank, start, start + size * count * line_size
    first_center = start + (float(begins[0]) + size / 2) * line_size
    low, high = shared(first_center, step * line_size, count, start, stop)
    return count, rank, low, high


def spread(cell: Tensor, dim: int, rows: int, columns: int) -> bool:
    """Check that the cells along `dim` are the crossings of rows and columns that divide a grid evenly."""
    groups = cell.movedim(dim, -1).flatten(0, -2).sort(1).values  # (groups, cells that are merged)
    cell_count = (groups.diff(dim=1) > 0).sum(1) + 1
    cells_per_crossing = cell_count
    for lines, length in ((groups // columns, rows), (groups % columns, columns)):
        steps = lines.sort(1).values.diff(dim=1)
        line_count = (steps > 0).sum(1) + 1
        even_step = (length // line_count)[:, None]
        if bool((length % line_count > 0).any()) or bool(((steps > 0) & (steps != even_step)).any()):
            return False
        cells_per_crossing = cells_per_crossing / line_count
    return bool((cells_per_crossing == 1).all())


def thinned(at: Tensor, length: int, start: float, stop: float) -> Side | None:
    """Return the rows, or columns, of a grid of which some tokens were kept; None if the kept ones are no even grid.

    They must be a contiguous range, or every second line, each of which then covers two.

    Args:
        at: Line (row or column) of each kept token.
        length: Number of lines of the old grid.
        start: Start of what these lines cover.
        stop: End of what they cover.
    """
    lines, rank = torch.unique(at, return_inverse=True)
    count, first = len(lines), int(lines[0])
    line_size = (stop - start) / length
    steps = lines.diff()
    step = int(steps[0]) if count > 1 else 1
    is_single_line = count == 1 and length > 1
    if bool((steps != step).any()) or step > 2 or is_single_line:
        return None
    if step == 1:
        return count, rank, start + first * line_size, start + (first + count) * line_size
    covers_all = first <= 1 and first + step * count >= length
    if not covers_all:
        return None
    return count, rank, start, start + min(first // 2 * 2 + step * count, length) * line_size
