"""Planes that are found from the codes of their cells: whole, padded, merged, or with cells left out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.core.capturing.tokens.planes import PADDING, Plane, Planes
from visattn.core.geometry import Box

CPU = torch.device("cpu")
WHOLE = Box(0.0, 0.0, 12.0, 20.0)


def image(rows: int = 3, columns: int = 4, box: Box = WHOLE, images: int = 2) -> tuple[Planes, Plane, Tensor]:
    """Return planes with a class token and a grid, the grid, and its codes."""
    planes = Planes(images, (12, 20), CPU)
    planes.set_of("cls")
    plane = planes.grid(rows, columns, box)
    return planes, plane, planes.codes(plane)


def clip(frames: int = 5, rows: int = 3, columns: int = 4) -> tuple[Planes, Plane, Tensor]:
    planes = Planes(2, (12, 20), CPU, frames)
    plane = planes.grid(rows, columns, WHOLE, frames)
    return planes, plane, planes.codes(plane)


def test_a_plane_in_raster_order_is_found_behind_its_padding() -> None:
    planes, plane, codes = image()
    assert planes.raster(codes) == (plane, (0, 0))
    assert planes.raster(codes[1:]) == (plane, (0, 0))
    for top, bottom, left, right in ((1, 0, 2, 0), (0, 1, 0, 2), (2, 1, 1, 3)):
        assert planes.raster(F.pad(codes, (left, right, top, bottom), value=PADDING)) == (plane, (top, left))


def test_a_plane_whose_cells_are_elsewhere_is_not_found() -> None:
    planes, _, codes = image()
    holed = codes.clone()
    holed[0, 1, 1] = PADDING
    second_holed = codes.clone()
    second_holed[1, 1, 1] = PADDING
    of_two_images = codes.clone()
    of_two_images[0, 1:] += 12
    exchanged = codes.clone()
    exchanged[1, 2, 1:3] = exchanged[1, 2, 1:3].flip(0)
    rolled = codes.roll(1, 2)
    for other in (holed, second_holed, of_two_images, exchanged, rolled, codes.mT, codes[:, :2], codes[:, :, 1:]):
        assert planes.raster(other)[0] is None
    for other in (holed, second_holed):
        assert planes.raster(F.pad(other, (1, 0, 2, 0), value=PADDING)) == (None, (0, 0))
    padding = torch.full_like(codes, PADDING)
    assert planes.raster(padding) == (None, (0, 0))
    assert planes.raster(F.pad(codes.mT, (1, 0, 2, 0), value=PADDING)) == (None, (0, 0))


def test_codes_of_two_planes_are_no_raster() -> None:
    planes, _, codes = image()
    other = planes.codes(planes.grid(3, 4, Box(0, 0, 6, 20)))
    assert planes.raster(torch.cat([codes[:, :2], other[:, 2:]], 1)) == (None, (0, 0))
    assert planes.raster(planes.codes(planes.set_of("word", 12)).view(2, 3, 4)) == (None, (0, 0))


def test_frames_of_a_clip_are_each_a_raster() -> None:
    planes, plane, codes = clip()
    frames = codes.flatten(0, 1)
    assert planes.raster(frames) == (plane, (0, 0))
    assert planes.raster(frames[3:5]) == (plane, (0, 0))
    mixed = torch.cat([frames[:1, :1], frames[1:2, 1:]], 1)
    assert planes.raster(mixed)[0] is None


def test_a_border_that_repeats_cells_is_counted() -> None:
    planes, plane, codes = image(4, 5)
    padded = F.pad(codes.double(), (2, 1, 1, 1), mode="replicate").int()
    assert planes.bordered(padded, (3, 3), (1, 2)) == (plane, (1, 2))
    assert planes.bordered(padded, (3, 3), (1, 1)) == (None, (0, 0))
    assert planes.bordered(padded, (3, 9), (1, 2)) == (None, (0, 0))  # wider than all
    assert planes.bordered(padded, (7, 3), (1, 2)) == (None, (0, 0))
    beside = F.pad(codes.double(), (2, 1, 0, 0), mode="replicate").int()
    assert planes.bordered(beside, (2, 3), (1, 2)) == (plane, (0, 2))
    above = F.pad(codes.double(), (0, 0, 2, 1), mode="replicate").int()
    assert planes.bordered(above, (3, 2), (2, 1)) == (plane, (2, 0))
    assert planes.bordered(codes, (1, 1), (1, 1)) == (plane, (0, 0))
    reflected = F.pad(codes.double(), (1, 1, 1, 1), mode="reflect").int()
    assert planes.bordered(reflected, (3, 3), (2, 2)) == (plane, (1, 1))
    assert planes.bordered(reflected, (3, 3), (1, 2)) == (None, (0, 0))
    assert planes.bordered(reflected, (3, 3), (2, 1)) == (None, (0, 0))


@pytest.mark.parametrize("size", [(1, 5), (4, 1), (1, 1)])
def test_a_plane_of_one_line_needs_no_border(size: tuple[int, int]) -> None:
    planes, plane, codes = image(*size)
    assert planes.bordered(codes, (1, 1), (1, 1)) == (plane, (0, 0))


def test_what_repeats_no_lines_is_no_border() -> None:
    planes, _, codes = image(4, 5)
    exchanged = codes.clone()
    exchanged[1, 2, 1:3] = exchanged[1, 2, 1:3].flip(0)
    of_two_images = codes.clone()
    of_two_images[0, 1:] += 20
    padded = F.pad(codes, (1, 1, 1, 1), value=PADDING)
    words = planes.codes(planes.set_of("word", 20)).view(2, 4, 5)
    other = planes.codes(planes.grid(4, 5, Box(0, 0, 6, 20)))
    for codes_of_none in (exchanged, of_two_images, padded, words, torch.cat([codes[:, :2], other[:, 2:]], 1), codes.mT):
        assert planes.bordered(codes_of_none, (1, 1), (1, 1)) == (None, (0, 0))
    first = torch.zeros_like(codes) + codes[:1, :1, :1]
    assert planes.bordered(first, (1, 1), (1, 1)) == (None, (0, 0))
    at_zero = Planes(2, (12, 20), CPU)
    plane = at_zero.grid(4, 5, WHOLE)
    assert at_zero.bordered(at_zero.codes(plane), (1, 1), (1, 1)) == (plane, (0, 0))


def windows(codes: Tensor, reach: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Return the codes that each window reads, `(B, rows, columns, reach)`."""
    return codes.unfold(1, reach[0], stride[0]).unfold(2, reach[1], stride[1]).flatten(3)


@pytest.mark.parametrize(
    ("reach", "stride", "grid", "box"),
    [
        ((2, 3), (2, 3), (2, 2), (1, 2, 9, 20)),
        ((4, 6), (4, 6), (1, 1), (1, 2, 9, 20)),
        ((1, 6), (1, 6), (4, 1), (1, 2, 9, 20)),
        ((3, 2), (1, 2), (2, 3), (1, 2, 9, 20)),  # rows that overlap and cover all
        ((1, 1), (1, 1), (4, 6), (1, 2, 9, 20)),
    ],
)
def test_merged_windows_are_a_grid(
    reach: tuple[int, int], stride: tuple[int, int], grid: tuple[int, int], box: tuple[float, ...]
) -> None:
    planes, _, codes = image(4, 6, Box(1, 2, 9, 20))
    merged = planes.merge(windows(codes, reach, stride), 3)
    assert merged is not None
    (plane,) = planes.of(merged)
    assert (plane.grid, plane.box) == (grid, Box(*box))
    assert torch.equal(merged[..., 0], planes.codes(plane))
    assert merged.shape == (2, *grid, 1)
    along_channels = windows(codes, reach, stride).movedim(3, 1)[:, :, None].expand(-1, -1, 7, -1, -1)
    other = planes.merge(along_channels, 1)
    assert other is not None
    assert torch.equal(other[:, 0, 3], planes.codes(plane))


def test_merged_windows_of_clips_keep_the_frames() -> None:
    planes, _, codes = clip(5, 4, 6)
    merged = planes.merge(windows(codes.flatten(0, 1), (2, 3), (2, 3)), 3)
    assert merged is not None
    (plane,) = planes.of(merged)
    assert plane.grid == (5, 2, 2)
    assert torch.equal(merged.view(2, 5, 2, 2), planes.codes(plane))
    over_all_frames = planes.merge(codes, 1)
    assert over_all_frames is not None
    (plane,) = planes.of(over_all_frames)
    assert plane.grid == (1, 4, 6)
    assert torch.equal(over_all_frames, planes.codes(plane))
    assert planes.merge(codes[:, :4], 1) is None  # a part of the clip
    assert planes.merge(codes[:, 1:], 1) is None
    assert planes.merge(codes[:, ::2], 1) is None  # with gaps
    many, _, of_many = clip(26, 1, 2)
    joined = many.merge(of_many, 3)
    assert joined is not None
    assert many.of(joined)[0].grid == (26, 1, 1)
    even = clip(4, 4, 6)
    pairs = even[0].merge(even[2].view(2, 2, 2, 4, 6), 2)
    assert pairs is not None
    assert even[0].of(pairs)[0].grid == (2, 4, 6)


def test_padding_does_not_count_among_merged_cells() -> None:
    planes, _, codes = image(4, 6)
    padded = windows(F.pad(codes, (0, 3, 0, 2), value=PADDING), (2, 3), (2, 3))
    merged = planes.merge(padded, 3)
    assert merged is not None
    (plane,) = planes.of(merged)
    assert plane.grid == (2, 2)
    assert torch.equal(merged[:, :2, :2, 0], planes.codes(plane))
    assert bool((merged[:, 2:] == PADDING).all())
    assert bool((merged[:, :, 2:] == PADDING).all())
    inside = windows(codes, (2, 3), (2, 3))
    assert planes.merge(F.pad(inside, (1, 2), value=PADDING), 3) is not None


def test_cells_that_form_no_grid_are_not_merged() -> None:
    planes, plane, codes = image(4, 6)
    blocks = windows(codes, (2, 3), (2, 3))
    assert planes.merge(codes.view(2, 2, 12)[:, :, :5], 2) is None  # no rectangle
    assert planes.merge(windows(codes, (1, 2), (1, 3)), 3) is None  # gaps
    assert planes.merge(windows(codes, (1, 2), (3, 2)), 3) is None
    assert planes.merge(codes, 0) is None  # two images
    assert planes.merge(blocks[:, :1], 3) is None  # one row of several
    assert planes.merge(blocks[:, :, 1:], 3) is None
    assert planes.merge(blocks[..., :0], 3) is None
    mixed = blocks.clone()
    mixed[0, 1, 1, 5] += plane.cells
    assert planes.merge(mixed, 3) is None
    missing = blocks.clone()
    missing[:, 1, 1] = missing[:, 0, 1]
    assert planes.merge(missing, 3) is None  # no window has the last cells
    words = planes.codes(planes.set_of("word", 6))
    assert planes.merge(words, 1) is None
    assert planes.merge(torch.cat([codes.flatten(1), words], 1), 1) is None


@pytest.mark.parametrize(("first_row", "first_column"), [(0, 0), (1, 0), (0, 2), (1, 2)])
def test_cells_that_are_spread_over_the_image_stand_for_all_of_it(first_row: int, first_column: int) -> None:
    planes, plane, codes = image(4, 6, Box(1, 2, 9, 20))
    spread = codes[:, first_row::2, first_column::3].flatten(1)
    merged = planes.merge(spread, 1)
    assert merged is not None
    (whole,) = planes.of(merged)
    assert (whole.grid, whole.box) == ((1, 1), plane.box)
    assert merged.tolist() == [[whole.base], [whole.base + 1]]
    assert planes.merge(F.pad(spread, (0, 1), value=PADDING), 1) is None
    assert planes.merge(spread[:, 1:], 1) is None
    in_clip, _, of_frames = clip(4, 4, 6)
    assert in_clip.merge(of_frames[:, :, first_row::2, first_column::3].flatten(1), 1) is None


@pytest.mark.parametrize(
    ("rows", "columns", "grid", "box"),
    [
        (slice(1, 3), slice(2, 6), (2, 4), (3, 8, 7, 20)),
        (slice(0, 4, 2), slice(1, 6, 2), (2, 3), (1, 2, 9, 20)),
        (slice(0, 4), slice(0, 6, 2), (4, 3), (1, 2, 9, 20)),
    ],
)
def test_cells_that_were_kept_are_a_grid_of_their_own(
    rows: slice, columns: slice, grid: tuple[int, int], box: tuple[float, ...]
) -> None:
    planes, plane, codes = image(4, 6, Box(1, 2, 9, 20))
    cell = torch.arange(24).view(4, 6)[rows, columns].flatten().flip(0)
    thinned = planes.thinned(plane, cell)
    assert thinned is not None
    assert (thinned[0].grid, thinned[0].box) == (grid, Box(*box))
    assert thinned[1].tolist() == list(range(len(cell)))[::-1]
    kept = codes[:, rows, columns]
    assert torch.equal(planes.coarsened(kept), planes.codes(thinned[0]))
    assert planes.thinned(plane, cell[1:]) is None
    assert planes.thinned(plane, codes[0, :, ::3].flatten() - plane.base) is None  # even rows alone
    assert planes.thinned(plane, codes[0, ::3].flatten() - plane.base) is None  # even columns alone
    assert torch.equal(planes.coarsened(kept.flatten(1)[:, 1:]), kept.flatten(1)[:, 1:])


def test_kept_cells_are_taken_from_each_frame() -> None:
    planes, plane, codes = clip(5, 4, 6)
    every_second = codes[:, :, ::2, 1::2]
    coarse = planes.coarsened(every_second)
    (grid,) = planes.of(coarse)
    assert grid.grid == (5, 2, 3)
    assert torch.equal(coarse, planes.codes(grid))
    without_a_frame = every_second[:, 1:]
    assert torch.equal(planes.coarsened(without_a_frame), without_a_frame)
    assert planes.thinned(plane, torch.arange(24)) is None


def test_codes_that_are_no_part_of_one_grid_stay() -> None:
    planes, _, codes = image(4, 6)
    other = planes.codes(planes.grid(2, 3, WHOLE))
    single = planes.codes(planes.grid(1, 1, WHOLE))
    words = planes.codes(planes.set_of("word", 7))
    kept = codes[:, ::2, ::2].flatten(1)
    assert planes.coarsened(codes) is codes
    assert planes.coarsened(words) is words
    both = torch.cat([codes[:, ::2, ::2].flatten(1), planes.codes(planes.grid(2, 2, WHOLE)).flatten(1)], 1)
    assert planes.coarsened(both) is both
    pair = torch.cat([kept, planes.codes(planes.grid(1, 2, WHOLE)).flatten(1)], 1)
    assert planes.coarsened(pair) is pair
    around = torch.cat([words, kept, single.flatten(1), torch.full((2, 1), PADDING, dtype=torch.int32)], 1)
    coarse = planes.coarsened(around)
    assert torch.equal(coarse[:, 7:13], other.flatten(1))
    assert torch.equal(coarse[:, :7], words)
    assert torch.equal(coarse[:, 13:], around[:, 13:])
    assert coarse.dtype == torch.int32


def test_cells_at_the_ends_belong_to_their_grid() -> None:
    planes = Planes(2, (12, 20), CPU)
    grid = planes.grid(4, 2, WHOLE)
    codes = planes.codes(grid)
    coarse = planes.coarsened(codes[:, 1::2])
    assert torch.equal(coarse, planes.codes(planes.grid(2, 2, WHOLE)))
    assert torch.equal(planes.coarsened(codes[:, ::2]), coarse)
