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
    share = (stop - start) / count
    slack = max(share, step) / 2 + _SLACK
    if abs(start + share / 2 - first) <= slack and abs(stop - share / 2 - (first + step * (count - 1))) <= slack:
        return start, stop
    return first - step / 2, first + step * (count - 0.5)


def border(at: Tensor, length: int, reach: int, stride: int) -> int | None:
    """Count the lines before a plane of `length` lines in the lines `at`, which repeat lines of the plane at its ends.

    Return None if a window reads lines that it does not cover, or one outside of its own cell more often than all lines in it.
    """
    own = torch.arange(length, device=at.device)
    begins = (at.unfold(0, length, 1) == own).all(1).nonzero().flatten() if len(at) >= length else own[:0]
    if not len(begins) or reach > len(at):
        return None
    before = int(begins[0])
    read = at.unfold(0, reach, stride)
    over = (torch.arange(len(at), device=at.device) - before).clamp(0, length - 1).unfold(0, reach, stride)
    inside = bool(((read.amin(1) >= over.amin(1)) & (read.amax(1) <= over.amax(1))).all())
    centers = torch.arange(len(read), device=at.device) * stride - before + (reach - 1) / 2
    times = (read[:, :, None] == read[:, None]).sum(2)  # how often a window reads the same line
    own = (read - centers[:, None]).abs() <= max(stride, 1) / 2
    return before if inside and bool(((times * own).amax(1) == times.amax(1)).all()) else None


def merged(first: Tensor, last: Tensor, length: int, start: float, stop: float) -> Side | None:
    """Return the side formed by cells from `first` to `last` on a side of `length` lines; cells at its ends may be cut off."""
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
        return None  # one window of several: it forms no grid on its own
    scale = (stop - start) / length
    if step == size and int(values[0]) == 0:  # no overlap: exactly the cells that were read; the last may be cut off
        return len(values), rank, start, start + size * len(values) * scale
    low, high = shared(start + (float(values[0]) + size / 2) * scale, step * scale, len(values), start, stop)
    return len(values), rank, low, high


def spread(cell: Tensor, dim: int, rows: int, columns: int) -> bool:
    """Check that the cells along `dim` are the crossings of rows and columns that divide a grid evenly."""
    groups = cell.movedim(dim, -1).flatten(0, -2).sort(1).values
    crossings = (groups.diff(dim=1) > 0).sum(1) + 1
    for at, length in ((groups // columns, rows), (groups % columns, columns)):
        steps = at.sort(1).values.diff(dim=1)
        count = (steps > 0).sum(1) + 1
        if bool((length % count > 0).any()) or bool(((steps > 0) & (steps != (length // count)[:, None])).any()):
            return False
        crossings = crossings / count
    return bool((crossings == 1).all())


def thinned(at: Tensor, length: int, start: float, stop: float) -> Side | None:
    """Return the side formed by the lines `at`: a contiguous range, or every second line, each of which then covers two."""
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
