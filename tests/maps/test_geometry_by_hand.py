"""Boxes, windows and cells with numbers worked out by hand."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest

from visattn.core.geometry import Box, Geometry, affine_corners
from visattn.errors import OptionError, ShapeError

PLACE = Geometry((40, 90), (10, 12), Box(5, 8, 35, 80), "a rule")  # 3 photo pixels per row of the input, 6 per column
GRID = (2, 3)
CELLS = Box(2, 3, 8, 9)  # input pixels; cells of 3 x 2


def test_sides_of_a_box_are_its_ends_less_its_starts() -> None:
    box = Box(2, 3, 7, 14)
    assert [box.height, box.width] == [5, 11]


@pytest.mark.parametrize(
    ("other", "common"),
    [
        (Box(4, 1, 10, 9), (4, 3, 7, 9)),
        (Box(1, 5, 6, 20), (2, 5, 6, 14)),
        (Box(9, 16, 11, 18), (9, 16, 9, 16)),
        (Box(0, 0, 1, 2), (2, 3, 2, 3)),
        (Box(7, 14, 9, 15), (7, 14, 7, 14)),
    ],
)
def test_boxes_intersect_in_what_both_cover(other: Box, common: tuple[int, ...]) -> None:
    assert Box(2, 3, 7, 14).intersect(other) == common


@pytest.mark.parametrize(
    "sizes",
    [
        ((0, 9), (3, 5), Box(0, 0, 4, 6)),
        ((7, 0), (3, 5), Box(0, 0, 4, 6)),
        ((7, 9), (0, 5), Box(0, 0, 4, 6)),
        ((7, 9), (3, 0), Box(0, 0, 4, 6)),
        ((7, 9), (3, 5), Box(4, 0, 4, 6)),
        ((7, 9), (3, 5), Box(0, 6, 4, 6)),
        ((7, 9), (3, 5), Box(5, 0, 4, 6)),
        ((-7, 9), (3, 5), Box(0, 0, 4, 6)),
    ],
)
def test_a_side_without_pixels_is_refused(sizes: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ShapeError, match="sides of photo, input and window must be positive"):
        Geometry(*sizes)


def test_a_side_of_one_pixel_or_part_of_one_is_enough() -> None:
    assert Geometry((1, 1), (1, 1), Box(0, 0, 0.5, 0.25)).scale == (0.5, 0.25)
    assert Geometry((1, 1), (1, 1), Box(0, 0, 1, 1)).rule == ""


def test_a_geometry_is_built_from_its_dictionary() -> None:
    stored = asdict(PLACE)
    stored = {**stored, "photo": [40, 90], "input": [10, 12], "window": [5, 8, 35, 80]}
    assert Geometry.from_dict(stored) == PLACE
    assert isinstance(Geometry.from_dict(stored).window, Box)


@pytest.mark.parametrize(
    ("window", "share"),
    [
        (Box(2, 5, 7, 15), 0.25),
        (Box(-5, -10, 5, 10), 0.25),
        (Box(5, 10, 25, 50), 0.25),
        (Box(0, 0, 10, 20), 1),
        (Box(-3, -4, 30, 40), 1),
        (Box(0, 0, 0.5, 20), 0.05),
        (Box(0, 0, 10, 0.5), 0.025),
        (Box(10, 2, 15, 8), 0),
        (Box(2, 20, 8, 25), 0),
        (Box(12, 25, 15, 30), 0),
        (Box(-9, -8, -2, -1), 0),
    ],
)
def test_share_is_the_part_of_the_photo_in_the_window(window: Box, share: float) -> None:
    assert Geometry((10, 20), (4, 6), window).share == pytest.approx(share, abs=1e-12)


def test_scale_is_photo_pixels_for_each_input_pixel() -> None:
    assert PLACE.scale == (3, 6)


def test_points_are_converted_in_both_directions() -> None:
    assert PLACE.to_input(11, 32) == (2, 4)
    assert PLACE.to_input(2, 2) == (-1, -1)
    assert PLACE.to_photo(2, 4) == (11, 32)
    assert PLACE.box_to_photo(Box(1, 2, 4, 5)) == (8, 20, 17, 38)


def test_the_same_photo_in_another_size_has_a_scaled_window() -> None:
    assert PLACE.resized((20, 270)) == Geometry((20, 270), (10, 12), Box(2.5, 24, 17.5, 240), "a rule")


@pytest.mark.parametrize(
    ("window", "seen"),
    [
        (Box(5, 8, 35, 80), (5, 8, 35, 80)),
        (Box(5.5, 8.5, 35.5, 80.5), (5, 8, 35, 80)),
        (Box(5.6, 8.6, 35.6, 80.6), (6, 9, 36, 81)),
        (Box(5.4, 8.4, 35.4, 80.4), (5, 8, 35, 80)),
        (Box(5.5 + 4e-10, 8.5 + 4e-10, 35.5 + 4e-10, 80.5 + 4e-10), (5, 8, 35, 80)),
        (Box(5.5 + 4e-9, 8.5 + 4e-9, 35.5 + 4e-9, 80.5 + 4e-9), (6, 9, 36, 81)),
        (Box(-7, -9, 50, 99), (0, 0, 40, 90)),
        (Box(50, 8, 60, 80), (50, 8, 50, 80)),
    ],
)
def test_the_model_sees_the_pixels_whose_centers_lie_in_its_window(window: Box, seen: tuple[int, ...]) -> None:
    assert Geometry((40, 90), (10, 12), window).seen() == seen


def test_a_part_of_the_input_is_seen_where_it_lies() -> None:
    assert PLACE.seen(Box(1, 2, 4, 5)) == (8, 20, 17, 38)


@pytest.mark.parametrize(
    ("point", "cell"),
    [
        ((11, 26), (0, 0)),
        ((19.9, 37.9), (0, 0)),
        ((20, 38), (1, 1)),
        ((11, 37.9), (0, 0)),
        ((11, 38), (0, 1)),
        ((11, 50), (0, 2)),
        ((28.9, 61.9), (1, 2)),
    ],
)
def test_a_point_lies_in_the_cell_that_covers_it(point: tuple[float, float], cell: tuple[int, int]) -> None:
    assert PLACE.patch_at(*point, GRID, CELLS) == cell


@pytest.mark.parametrize("point", [(10.9, 30), (29, 30), (15, 25.9), (15, 62), (0, 0), (39.9, 89.9)])
def test_a_point_beside_the_cells_was_cropped_away(point: tuple[float, float]) -> None:
    said = f"pixel {point[1]:g},{point[0]:g} was cropped away: the model received x 26 to 62 and y 11 to 29."
    with pytest.raises(OptionError, match=re.escape(said)):
        PLACE.patch_at(*point, GRID, CELLS)


@pytest.mark.parametrize("point", [(-0.1, 30), (40, 30), (15, -0.1), (15, 90), (41, 91)])
def test_a_point_beside_the_photo_is_refused(point: tuple[float, float]) -> None:
    said = f"pixel {point[1]:g},{point[0]:g} lies outside the photo of 90 x 40 pixels"
    with pytest.raises(OptionError, match=re.escape(said)):
        PLACE.patch_at(*point, GRID, CELLS)


def test_the_first_and_the_last_pixel_of_a_photo_lie_in_its_corner_cells() -> None:
    whole = Geometry((40, 90), (10, 12), Box(0, 0, 40, 90))
    assert whole.patch_at(0, 0, (5, 4), Box(0, 0, 10, 12)) == (0, 0)
    assert whole.patch_at(39.9, 89.9, (5, 4), Box(0, 0, 10, 12)) == (4, 3)


@pytest.mark.parametrize(
    ("cell", "box"),
    [((0, 0), (11, 26, 20, 38)), ((1, 0), (20, 26, 29, 38)), ((0, 1), (11, 38, 20, 50)), ((1, 2), (20, 50, 29, 62))],
)
def test_a_cell_covers_its_part_of_the_photo(cell: tuple[int, int], box: tuple[int, ...]) -> None:
    assert PLACE.patch_box(*cell, GRID, CELLS) == pytest.approx(box)


def test_an_affine_transform_maps_each_corner() -> None:
    assert affine_corners([[2, 3, 5], [7, 11, 13]]) == [(-2, 0.5), (5, 2.5), (16, 5.5), (9, 3.5)]


def test_the_identity_keeps_the_corners_of_the_input() -> None:
    assert affine_corners([[1, 0, 0], [0, 1, 0]]) == [(0, 0), (0, 1), (1, 1), (1, 0)]


def test_corners_are_no_whole_numbers_in_general() -> None:
    found = affine_corners([[0.5, 0.25, 0.125], [-0.75, 0.5, 0.25]])
    assert found == [(0.75, 0.1875), (0, 0.6875), (0.5, 0.9375), (1.25, 0.4375)]
