"""Rows and columns of grids: what merged, kept and padded lines cover."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from visattn.core.capturing.tokens.lines import border, merged, shared, spread, thinned

Lines = list[int]
Found = tuple[int, list[int], float, float] | None


@pytest.mark.parametrize(
    ("first", "step", "expected"),
    [
        (2, 4, (0, 12)),  # exact
        (4, 4, (0, 12)),  # half a cell late
        (0, 4, (0, 12)),  # half a cell early
        (4.1, 4, (2.1, 14.1)),
        (-0.1, 4, (-2.1, 9.9)),
        (2, 2, (1, 7)),  # only the last center is off
        (-2, 6, (-5, 13)),  # only the first is
        (-0.9, 6, (0, 12)),  # half a step is more than half an even cell
        (4, 2, (0, 12)),  # half an even cell is more than half a step
        (4 + 5e-7, 4, (0, 12)),
        (4 + 2e-6, 4, (2 + 2e-6, 14 + 2e-6)),
    ],
)
def test_centers_within_half_a_cell_of_an_even_division_share_its_range(
    first: float, step: float, expected: tuple[float, float]
) -> None:
    assert shared(first, step, 3, 0, 12) == pytest.approx(expected, abs=1e-9)
    moved = shared(first + 5, step, 3, 5, 17)
    assert moved == pytest.approx((expected[0] + 5, expected[1] + 5), abs=1e-9)


def test_even_cells_need_no_whole_number_of_pixels() -> None:
    assert shared(2.5, 2, 4, 0, 11) == (0, 11)  # even cells are 2.75 wide, half of that is within reach
    assert shared(2.7, 2.75, 4, 0, 11) == (0, 11)
    assert shared(2.8, 2.75, 4, 0, 11) == pytest.approx((2.8 - 1.375, 2.8 + 3.5 * 2.75))


@pytest.mark.parametrize(
    ("at", "length", "reach", "stride", "before"),
    [
        ([0, 1, 2, 3], 4, 1, 1, 0),  # nothing was put before or behind
        ([0, 1, 2], 3, 3, 1, 0),  # one window over all
        ([0, 1, 2], 3, 4, 1, None),
        ([0, 1], 3, 1, 1, None),  # fewer lines than the plane has
        ([0, 2, 1, 3], 4, 1, 1, None),
        ([0, 1, 0, 1], 2, 1, 4, 0),  # the plane is there twice
        ([0, 0, 1, 2, 3, 3], 4, 3, 1, 1),  # repeated
        ([1, 0, 1, 2, 3, 2], 4, 3, 1, None),  # reflected: the first window reads line 1 twice
        ([1, 0, 1, 2, 3, 2], 4, 3, 2, 1),  # which now lies in its own cell
        ([0, 0, 1, 2], 3, 1, 2, 1),
        ([0, 1, 2, 2], 3, 1, 3, 0),
        ([1, 0, 1, 2], 3, 1, 4, None),  # reads a higher line than it covers
        ([0, 1, 2, 1], 3, 2, 2, None),  # reads a lower one
    ],
)
def test_lines_before_a_plane_are_counted_if_windows_read_what_they_cover(
    at: Lines, length: int, reach: int, stride: int, before: int | None
) -> None:
    assert border(torch.tensor(at), length, reach, stride) == before


def before_plane(at: Lines, length: int, reach: int, stride: int) -> int | None:
    """Count the lines before a plane, window by window."""
    before = next((start for start in range(len(at)) if at[start : start + length] == list(range(length))), None)
    if before is None or reach > len(at):
        return None
    for start in range(0, len(at) - reach + 1, stride):
        read = at[start : start + reach]
        covered = [min(max(line - before, 0), length - 1) for line in range(start, start + reach)]
        center = start - before + (reach - 1) / 2
        own = [read.count(line) for line in read if abs(line - center) <= stride / 2]
        if min(read) < min(covered) or max(read) > max(covered) or max(own, default=0) < max(map(read.count, read)):
            return None
    return before


def test_padded_lines_agree_with_a_walk_over_all_windows() -> None:
    found = set()
    for mode, length, first, last, reach, stride in itertools.product(
        ("reflect", "replicate", "circular"), (2, 3, 4, 5), (0, 1, 2), (0, 1, 2), (1, 2, 3, 4, 5), (1, 2, 3)
    ):
        if max(first, last) >= length:
            continue
        at = F.pad(torch.arange(float(length))[None, None], (first, last), mode=mode)[0, 0].long()
        before = before_plane(at.tolist(), length, reach, stride)
        assert border(at, length, reach, stride) == before
        found.add(before)
    assert found == {None, 0, 1, 2}


@pytest.mark.parametrize(
    ("first", "last", "length", "expected"),
    [
        ([0, 2, 4], [1, 3, 5], 6, (3, [0, 1, 2], 10, 22)),
        ([4, 0, 2, 0], [5, 1, 3, 1], 6, (3, [2, 0, 1, 0], 10, 22)),  # in any order, several times
        ([0, 2], [1, 3], 5, (2, [0, 1], 10, 18)),  # the last line is not read
        ([0, 2, 4], [1, 3, 4], 5, (3, [0, 1, 2], 10, 22)),  # the last cell is cut off
        ([0, 1, 3], [0, 2, 4], 5, (3, [0, 1, 2], 10, 20)),  # the first cell is cut off
        ([0, 2, 4], [1, 2, 5], 6, None),  # a cell in between is smaller
        ([0, 1, 2], [2, 3, 4], 5, (3, [0, 1, 2], 10, 20)),  # overlapping cells that cover all lines
        ([0, 1], [2, 3], 9, (2, [0, 1], 12, 16)),  # overlapping cells at the start
        ([5, 6], [7, 8], 9, (2, [0, 1], 22, 26)),  # and at the end
        ([0, 1, 2], [0, 1, 2], 3, (3, [0, 1, 2], 10, 16)),  # nothing is merged
        ([0, 3], [1, 4], 5, None),  # a gap
        ([0, 1, 3], [1, 2, 4], 5, None),  # uneven steps
        ([0, 0], [3, 3], 4, (1, [0, 0], 10, 18)),  # one cell for all lines
        ([0], [0], 1, (1, [0], 10, 12)),
        ([1], [3], 4, None),  # one cell without the first line
        ([0], [2], 4, None),  # or without the last
        ([1, 3], [2, 4], 5, (2, [0, 1], 10, 20)),  # no overlap, but not from the first line on
        ([3, 4], [3, 4], 11, (2, [0, 1], 16, 20)),
    ],
)
def test_merged_lines_are_a_grid_if_they_are_even(first: Lines, last: Lines, length: int, expected: Found) -> None:
    side = merged(torch.tensor(first), torch.tensor(last), length, 10, 10 + 2 * length)
    assert (side and (side[0], side[1].tolist(), *side[2:])) == expected


@pytest.mark.parametrize(("rows", "columns"), [(2, 4), (4, 2), (3, 3), (1, 6)])
def test_spread_cells_are_crossings_of_even_rows_and_columns(rows: int, columns: int) -> None:
    cells = list(range(rows * columns))
    even = {
        frozenset(row * columns + column for row in down for column in across)
        for down, across in itertools.product(even_lines(rows), even_lines(columns))
    }
    for size in range(1, len(cells) + 1):
        for some in itertools.combinations(cells, size):
            assert spread(torch.tensor(some)[:, None], 0, rows, columns) == (frozenset(some) in even), some


def even_lines(length: int) -> list[range]:
    """Return all sets of lines that divide a side evenly."""
    steps = [step for step in range(1, length + 1) if length % step == 0]
    return [range(first, length, step) for step in steps for first in range(step)]


def test_spread_cells_may_repeat_and_lie_along_any_axis() -> None:
    crossings = torch.tensor([15, 0, 3, 0, 12, 12, 3])  # rows 0 and 2, columns 0 and 3 of four by six
    assert spread(crossings.view(1, 7, 1).expand(2, 7, 3), 1, 4, 6)
    assert spread(torch.stack([crossings, crossings + 7]), 1, 4, 6)
    assert not spread(torch.stack([crossings, crossings.clone().fill_(0)]), 0, 4, 6)


def test_each_group_of_spread_cells_is_checked() -> None:
    even, uneven = torch.tensor([0, 3, 12, 15]), torch.tensor([0, 3, 12, 14])
    assert spread(torch.stack([even, even + 1]), 1, 4, 6)
    assert not spread(torch.stack([even, uneven]), 1, 4, 6)
    assert not spread(torch.stack([even, torch.tensor([0, 3, 12, 12])]), 1, 4, 6)


@pytest.mark.parametrize(
    ("at", "length", "expected"),
    [
        ([1, 2, 3], 6, (3, [0, 1, 2], 12, 18)),  # a range
        ([2, 1, 2, 3], 6, (3, [1, 0, 1, 2], 12, 18)),
        ([0, 1], 2, (2, [0, 1], 10, 14)),
        ([4, 5], 6, (2, [0, 1], 18, 22)),
        ([0, 0], 1, (1, [0, 0], 10, 12)),
        ([0], 2, None),  # a single line of several
        ([1], 2, None),
        ([0, 2, 4], 6, (3, [0, 1, 2], 10, 22)),  # every second line
        ([1, 3, 5], 6, (3, [0, 1, 2], 10, 22)),
        ([0, 2, 4], 5, (3, [0, 1, 2], 10, 20)),  # the last one covers a single line
        ([1, 3], 5, (2, [0, 1], 10, 18)),
        ([0, 2], 5, None),  # the last line belongs to none
        ([1, 3], 6, None),
        ([2, 4], 6, None),  # nor do the first
        ([0, 3], 6, None),  # every third
        ([0, 1, 3], 4, None),
        ([0, 2, 3], 4, None),
    ],
)
def test_kept_lines_are_a_range_or_every_second_one(at: Lines, length: int, expected: Found) -> None:
    side = thinned(torch.tensor(at), length, 10, 10 + 2 * length)
    assert (side and (side[0], side[1].tolist(), *side[2:])) == expected
