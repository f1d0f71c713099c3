"""Numbers that planes and sets give to their cells and members, and the images that they belong to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from visattn.core.capturing.tokens.planes import PADDING, Pixels, Plane, Planes, compact
from visattn.core.geometry import Box

CPU = torch.device("cpu")
WHOLE = Box(0.0, 0.0, 12.0, 20.0)


def numbers(*codes: int) -> Tensor:
    return torch.tensor(codes, dtype=torch.int32)


class Some:
    """Two images with two grids and two sets."""

    def __init__(self, images: int = 2, frames: int = 0) -> None:
        self.planes = Planes(images, (12, 20), CPU, frames)
        self.large = self.planes.grid(3, 4, WHOLE)  # codes 0 to 23
        self.words = self.planes.set_of("word#0", 5)  # 24 to 28, then 29 to 38
        self.small = self.planes.grid(1, 2, WHOLE)  # 39 to 42
        self.queries = self.planes.set_of("query", 2)  # 43 and 44, then 45 to 48


def test_codes_of_planes_follow_each_other() -> None:
    some = Some()
    assert [(plane.start, plane.base) for plane in (some.large, some.words, some.small, some.queries)] == [
        (0, 0),
        (24, 29),
        (39, 39),
        (43, 45),
    ]
    assert [plane.cells for plane in (some.large, some.words, some.small, some.queries)] == [12, 5, 2, 2]
    assert some.large == Plane(0, (3, 4), WHOLE, "", 1)
    assert some.words == Plane(29, (), WHOLE, "word#0", 5)
    assert (some.planes.images, some.planes.input, some.planes.frames, some.planes.choices) == (2, WHOLE, 0, [])


def test_a_plane_alone_is_a_set_of_one_without_a_name() -> None:
    plane = Plane(7, (), WHOLE)
    assert (plane.name, plane.count, plane.cells, plane.frames, plane.area, plane.start) == ("", 1, 1, 1, 1, 6)


def test_grids_of_clips_have_frames() -> None:
    planes = Planes(2, (12, 20), CPU, 5)
    grid = planes.grid(3, 4, WHOLE, 5)
    assert (grid.grid, grid.cells, grid.frames, grid.area, grid.columns) == ((5, 3, 4), 60, 5, 12, 4)
    assert planes.grid(3, 4, WHOLE).grid == (1, 3, 4)
    image = Planes(2, (12, 20), CPU).grid(3, 4, WHOLE)
    assert (image.grid, image.cells, image.frames, image.area, image.columns) == ((3, 4), 12, 1, 12, 4)


def test_grids_within_a_thousandth_of_a_pixel_are_one() -> None:
    planes = Planes(2, (12, 20), CPU)
    first = planes.grid(3, 4, WHOLE)
    assert planes.grid(3, 4, Box(0.0004, 0, 12, 20)) is first
    assert planes.grid(3, 4, Box(0.004, 0, 12, 20)) is not first
    assert planes.grid(4, 3, WHOLE) is not first
    assert planes.grid(3, 4, Box(0, 0, 12, 20.01)).box == Box(0.0, 0.0, 12.0, 20.01)


def test_sets_are_known_by_name_and_count() -> None:
    planes = Planes(2, (12, 20), CPU)
    first = planes.set_of("cls")
    assert first.count == 1
    assert planes.set_of("cls", 1) is first
    assert planes.set_of("cls", 2) is not first
    assert planes.set_of("mask") is not first


def test_picks_of_the_same_tokens_have_the_same_set() -> None:
    planes = Planes(2, (12, 20), CPU)
    picks = [torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 2], [4, 5]]), torch.tensor([[1, 2, 3], [4, 5, 7]])]
    chosen = [planes.choice(pick) for pick in picks]
    assert [(number, plane.name, plane.count) for number, plane in chosen] == [
        (0, "query#0", 3),
        (1, "query#1", 2),
        (2, "query#2", 3),
    ]
    assert [planes.choice(pick.clone()) for pick in picks] == chosen
    assert len(planes.choices) == 3


def test_words_of_one_table_are_numbered_on() -> None:
    some = Some()
    planes, first = some.planes, some.words
    other = planes.set_of("text#0", 7)
    second = planes.set_of("word#1", 3)
    planes.set_of("word#1", 4)  # the same words, in another number
    third = planes.set_of("word#2", 6)
    assert [planes.number(first, first.base + code) for code in (0, 4, 5, 9, -5, -1)] == [0, 4, 0, 4, 0, 4]
    assert planes.number(second, second.base + 2) == 5 + 2
    assert planes.number(third, third.base + 6 + 1) == 5 + 4 + 1
    assert planes.number(other, other.base + 8) == 1
    assert planes.number(some.queries, 48) == 1


def test_members_have_met_no_image_unless_there_is_one_alone() -> None:
    some, alone = Some(), Some(images=1)
    assert some.planes.members(some.words).tolist() == [24, 25, 26, 27, 28]
    assert some.planes.members(some.queries).tolist() == [43, 44]
    start = alone.words.base
    assert alone.planes.members(alone.words).tolist() == list(range(start, start + 5))
    assert start == alone.words.start + 5


def test_members_are_given_to_an_image_once() -> None:
    some = Some()
    codes = numbers(23, 24, 28, 29, 38, 39, 43, 44, 45, PADDING)
    assert some.planes.given(codes, 0).tolist() == [23, 29, 33, 29, 38, 39, 45, 46, 45, PADDING]
    assert some.planes.given(codes, 1).tolist() == [23, 34, 38, 29, 38, 39, 47, 48, 45, PADDING]
    assert some.planes.given(codes, 1).dtype == torch.int32
    alone = Some(images=1)
    assert torch.equal(alone.planes.given(codes, 0), codes)


def test_each_row_is_given_to_its_own_image() -> None:
    some = Some()
    codes = numbers(24, 25, 26).expand(2, 3)
    assert some.planes.given(codes, torch.tensor([[1], [0]])).tolist() == [[34, 35, 36], [29, 30, 31]]
    wide = numbers(24, 25, 26)[:, None].expand(3, 4)
    given = some.planes.given(wide, 1)
    assert given.tolist() == [[34] * 4, [35] * 4, [36] * 4]
    assert given.stride(1) == 0


def test_members_meet_the_image_of_the_same_member() -> None:
    some = Some()
    pairs = [
        (24, 29, 29),  # the first member in the first image
        (28, 38, 38),  # the last member in the last image
        (25, 30, 30),
        (25, 35, 35),
        (24, 30, 24),  # another member
        (24, 39, 24),  # a cell of the grid that follows
        (26, 26, 26),  # which has met none either
        (30, 35, 30),  # which has met an image already
        (44, 48, 48),
        (43, 48, 43),
        (23, 29, 23),
        (PADDING, 29, PADDING),
    ]
    codes, others, expected = (numbers(*column) for column in zip(*pairs, strict=True))
    assert torch.equal(some.planes.met(codes, others), expected)
    assert some.planes.met(numbers(24)[None], numbers(29, 34)[:, None]).tolist() == [[29], [34]]


def test_members_return_to_the_set_without_images() -> None:
    some = Some()
    codes = numbers(0, 23, 24, 28, 29, 34, 36, 38, 39, 42, 43, 45, 48, PADDING)
    assert some.planes.without_images(codes).tolist() == [0, 23, 24, 28, 24, 24, 26, 28, 39, 42, 43, 43, 44, PADDING]
    assert some.planes.without_images(codes).dtype == torch.int32
    assert some.planes.without_images(numbers(30).expand(3, 2)).tolist() == [[25, 25]] * 3


def test_sets_that_may_be_free_are_those_of_several_images() -> None:
    some, alone = Some(), Some(images=1)
    assert some.planes.sets(numbers(0, 24, 39, 48)) == [some.words, some.queries]
    assert some.planes.sets(numbers(0, 39)) == []
    assert alone.planes.sets(alone.planes.members(alone.words)) == []
    grids = Planes(2, (12, 20), CPU)
    grids.grid(3, 4, WHOLE)
    assert grids.sets(numbers(0)) == []


def test_planes_of_codes_come_in_the_order_of_their_creation() -> None:
    some = Some()
    of = some.planes.of
    assert of(numbers(48, 0, 24)) == [some.large, some.words, some.queries]
    assert of(numbers(23, 0)) == [some.large]
    assert of(numbers(24, 38)) == [some.words]
    assert of(numbers(39, 42, PADDING)) == [some.small]
    assert of(numbers(PADDING, 38, 39)) == [some.words, some.small]
    assert of(numbers(PADDING, -4)) == []
    assert of(numbers()) == []
    assert of(numbers(43).expand(3, 2)) == [some.queries]
    assert some.planes.numbers(numbers(0, 23, 24, 38, 39, 42, 43, 48, PADDING)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, -1]
    assert (some.planes.on_grid(numbers(24, 48)), some.planes.on_grid(numbers(24, 39))) == (False, True)


def test_all_codes_of_a_plane_lie_by_image() -> None:
    some = Some()
    assert torch.equal(some.planes.codes(some.large), torch.arange(24, dtype=torch.int32).view(2, 3, 4))
    assert some.planes.codes(some.words).tolist() == [[29, 30, 31, 32, 33], [34, 35, 36, 37, 38]]
    assert some.planes.codes(some.small).tolist() == [[[39, 40]], [[41, 42]]]
    assert some.planes.codes(some.words).dtype == torch.int32


def test_images_of_codes_are_found_in_grids_and_sets() -> None:
    some = Some()
    codes = numbers(0, 11, 12, 23, 24, 28, 29, 33, 34, 38, 39, 40, 41, 42, 43, 46, 47, PADDING)
    assert some.planes.images_of(codes).tolist() == [0, 0, 1, 1, -1, -1, 0, 0, 1, 1, 0, 0, 1, 1, -1, 0, 1, -1]


def test_cells_of_several_images_and_frames_are_split() -> None:
    some, clip = Some(), Planes(2, (12, 20), CPU, 3)
    image, cell = some.planes.split(numbers(39, 40, 41, 42), some.small)
    assert (image.tolist(), cell.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])
    grid = clip.grid(1, 2, WHOLE, 3)
    frame, cell = clip.split(numbers(0, 3, 5, 6, 11), grid)
    assert (frame.tolist(), cell.tolist()) == ([0, 1, 2, 3, 5], [0, 1, 1, 0, 1])


def test_tokens_that_occur_once_are_not_told_apart() -> None:
    some = Some()
    codes = numbers(29, 30, 0, 1, 30, 29, 0)[None]
    assert torch.equal(some.planes.apart(codes, 3), codes)
    in_one_block = torch.stack([numbers(29, 0, 1, 29), numbers(2, 3, 4, 5)])
    assert torch.equal(some.planes.apart(in_one_block, 2), in_one_block)


def test_each_occurrence_in_a_block_is_a_token_of_its_own() -> None:
    some = Some()
    codes = numbers(29, 31, 29, 0, 31, 29, 7)[None]  # three queries, four keys
    told = some.planes.apart(codes, 3)
    apart = some.planes.set_of("word#0", 10)
    assert apart.base == 49 + 10
    assert (told - apart.base).tolist() == [[0, 4, 1, -59, 4, 0, 7 - 59]]
    seven = some.planes.apart(numbers(33, 33, 33, 0, 34)[None], 5)
    assert (seven - some.planes.set_of("word#0", 15).base).tolist()[0][:3] == [12, 13, 14]
    assert seven[0, 3:].tolist() == [0, 34]  # of another image


def test_each_block_has_tokens_of_its_own() -> None:
    some = Some()
    codes = torch.stack([numbers(45, 0, 45, 0), numbers(46, 1, 46, 1), numbers(2, 3, 45, 2)])
    told = some.planes.apart(codes, 2)
    base = some.planes.set_of("query", 6).base
    assert (told[:, ::2] - base).tolist() == [[0, 0], [4, 4], [2 - base, 2]]
    assert torch.equal(told[:, 1::2], codes[:, 1::2])


def test_tokens_may_occur_several_times_in_several_blocks() -> None:
    some = Some()
    codes = torch.stack([numbers(45, 45, 0, 46), numbers(46, 1, 2, 45)])
    told = some.planes.apart(codes, 3)
    base = some.planes.set_of("query", 2 * 2 * 2).base
    rows = [[number - base if number >= base else number for number in row] for row in told.tolist()]
    assert rows == [[0, 1, 0, 4], [6, 1, 2, 2]]


def test_pixels_are_the_first_codes() -> None:
    assert Planes(2, (12, 20), CPU).pixels == Pixels(480)
    assert Planes(2, (12, 20), CPU, 1).pixels == Pixels(480)
    assert Planes(2, (12, 20), CPU, 3).pixels == Pixels(1440)


@pytest.mark.parametrize(("first", "holds"), [(0, True), (9, True), (10, False), (11, False)])
def test_pixels_hold_codes_by_the_first_one(first: int, holds: bool) -> None:
    pixels, last = Pixels(10), 20 - first
    assert pixels.holds(torch.tensor([[first, last], [last, last]])) is holds
    assert pixels.holds(torch.tensor([[first, last], [last, last]]).T) is holds
    assert pixels.holds(torch.tensor([[last, first], [last, last]]).T[1:]) is holds
    assert not pixels.holds(torch.empty(0, dtype=torch.int32))


def test_expanded_axes_are_compacted() -> None:
    codes = torch.arange(6).view(2, 3, 1)
    assert compact(codes.expand(2, 3, 4)).shape == (2, 3, 1)
    assert compact(codes[:1].expand(5, 3, 4)).shape == (1, 3, 1)
    assert torch.equal(compact(codes.expand(2, 3, 4)), codes)
    assert compact(codes) is codes
    once = torch.arange(1).expand(1)
    assert compact(once) is once
    empty = torch.arange(1).expand(3)[:0]
    assert compact(empty).shape == (0,)


def test_times_are_shares_of_the_clip() -> None:
    planes = Planes(2, (12, 20), CPU, 4)
    grid, words = planes.grid(1, 2, WHOLE, 4), planes.set_of("word", 3)
    codes = numbers(grid.base, grid.base + 1, grid.base + 5, grid.base + 7, grid.base + 10, words.start, words.base, PADDING)
    begin, end = planes.times(codes)
    nan = [pytest.approx(torch.nan, nan_ok=True)] * 3
    assert begin.tolist() == [0, 0, 0.5, 0.75, 0.25, *nan]
    assert end.tolist() == [0.25, 0.25, 0.75, 1, 0.5, *nan]
    assert begin.dtype == torch.float64


def test_boxes_are_the_corners_of_cells() -> None:
    planes = Planes(2, (12, 20), CPU)
    planes.set_of("cls")
    grid = planes.grid(3, 4, Box(1, 2, 10, 18))
    words = planes.set_of("word", 3)
    codes = numbers(grid.base, grid.base + 6, grid.base + 23, words.start, words.base, PADDING, 0)
    low, high = planes.boxes(codes)
    assert low[:3].tolist() == [[1, 2], [4, 10], [7, 14]]
    assert high[:3].tolist() == [[4, 6], [7, 14], [10, 18]]
    assert bool(torch.cat([low[3:], high[3:]]).isnan().all())
    assert (low.shape, low.dtype, high.dtype) == ((7, 2), torch.float64, torch.float64)
    clip = Planes(2, (12, 20), CPU, 3)
    of_clip = clip.grid(1, 2, Box(0, 0, 12, 20), 3)
    low, _ = clip.boxes(numbers(of_clip.base + 3, of_clip.base + 10))
    assert low.tolist() == [[0, 10], [0, 0]]
