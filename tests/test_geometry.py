from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import assume, given, settings, strategies as st

from visattn.core.geometry import Box, Geometry
from visattn.errors import OptionError, ShapeError

SIDES = st.integers(1, 2000)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Draw a crop, a padding or a squash of a photo."""
    photo = draw(SIDES), draw(SIDES)
    window = Box(
        top := draw(st.floats(-500, 1500)),
        left := draw(st.floats(-500, 1500)),
        top + draw(st.floats(1, 3000)),
        left + draw(st.floats(1, 3000)),
    )
    return Geometry(photo, (draw(st.integers(16, 600)), draw(st.integers(16, 600))), window, "drawn")


def whole(height: int, width: int, side: tuple[int, int]) -> Geometry:
    return Geometry((height, width), side, Box(0, 0, height, width))


quick = settings(max_examples=200, derandomize=True, deadline=None, database=None)


@quick
@given(geometries(), st.floats(-1000, 3000), st.floats(-1000, 3000))
def test_to_photo_is_the_inverse_of_to_input(geometry: Geometry, y: float, x: float) -> None:
    assert geometry.to_photo(*geometry.to_input(y, x)) == pytest.approx((y, x), abs=1e-6)


@quick
@given(geometries(), st.floats(-1000, 3000), st.floats(-1000, 3000))
def test_to_input_is_the_inverse_of_to_photo(geometry: Geometry, y: float, x: float) -> None:
    assert geometry.to_input(*geometry.to_photo(y, x)) == pytest.approx((y, x), abs=1e-5)


@quick
@given(geometries())
def test_window_fills_the_input(geometry: Geometry) -> None:
    window = geometry.window
    assert geometry.to_input(window.top, window.left) == pytest.approx((0, 0), abs=1e-6)
    assert geometry.to_input(window.bottom, window.right) == pytest.approx(geometry.input, abs=1e-5)


@quick
@given(geometries(), st.integers(1, 40), st.integers(1, 40), st.data())
def test_center_of_a_patch_box_is_in_that_patch(geometry: Geometry, rows: int, columns: int, data: st.DataObject) -> None:
    grid, box = (rows, columns), Box(0, 0, *geometry.input)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    patch = geometry.patch_box(row, column, grid, box)
    y, x = (patch.top + patch.bottom) / 2, (patch.left + patch.right) / 2
    if 0 <= y < geometry.photo[0] and 0 <= x < geometry.photo[1]:
        assert geometry.patch_at(y, x, grid, box) == (row, column)
    else:
        with pytest.raises(OptionError, match="lies outside the photo"):
            geometry.patch_at(y, x, grid, box)


@quick
@given(geometries(), st.integers(1, 9), st.integers(1, 9))
def test_patch_boxes_tile_the_window(geometry: Geometry, rows: int, columns: int) -> None:
    box = Box(0, 0, *geometry.input)
    boxes = [geometry.patch_box(r, c, (rows, columns), box) for r in range(rows) for c in range(columns)]
    area = sum(patch.height * patch.width for patch in boxes)
    assert area == pytest.approx(geometry.window.height * geometry.window.width, rel=1e-6)
    assert min(patch.top for patch in boxes) == pytest.approx(geometry.window.top, abs=1e-6)
    assert max(patch.right for patch in boxes) == pytest.approx(geometry.window.right, abs=1e-6)


@quick
@given(geometries())
def test_seen_pixels_are_those_whose_centers_lie_in_the_window(geometry: Geometry) -> None:
    seen, window = geometry.seen(), geometry.window
    gaps = [abs(edge - 0.5 - round(edge - 0.5)) for edge in window]  # an edge lies on a pixel center or well off it
    assume(all(gap < 1e-12 or gap > 1e-5 for gap in gaps))
    down = [i for i in range(geometry.photo[0]) if window.top - 1e-6 <= i + 0.5 < window.bottom - 1e-6]
    across = [i for i in range(geometry.photo[1]) if window.left - 1e-6 <= i + 0.5 < window.right - 1e-6]
    assert list(range(int(seen.top), int(seen.bottom))) == down
    assert list(range(int(seen.left), int(seen.right))) == across


def test_squashed_photo_has_a_separate_scale_for_each_axis() -> None:
    geometry = whole(100, 400, (200, 200))
    assert geometry.scale == (0.5, 2.0)
    assert geometry.to_input(50, 100) == (100, 50)


def test_seen_box_of_a_center_crop_is_the_center() -> None:
    geometry = Geometry((100, 300), (100, 100), Box(0, 100, 100, 200))
    assert geometry.seen() == Box(0, 100, 100, 200)
    assert geometry.to_input(10, 100) == (10, 0)


def test_seen_box_with_padding_is_the_photo() -> None:
    geometry = Geometry((100, 300), (300, 300), Box(-100, 0, 200, 300))
    assert geometry.seen() == Box(0, 0, 100, 300)
    assert geometry.to_input(0, 0) == (100, 0)


def test_seen_box_of_a_token_box_excludes_the_rest_of_the_input() -> None:
    assert whole(230, 230, (230, 230)).seen(Box(0, 0, 224, 224)) == Box(0, 0, 224, 224)


@pytest.mark.parametrize(
    ("point", "cell"),
    [((0, 0), (0, 0)), ((15.99, 15.99), (0, 0)), ((16, 16), (1, 1)), ((0, 31), (0, 1)), ((47.5, 0), (2, 0))],
    ids=str,
)
def test_patch_at_counts_rows_down_and_columns_across(point: tuple[float, float], cell: tuple[int, int]) -> None:
    assert whole(48, 32, (48, 32)).patch_at(*point, (3, 2), Box(0, 0, 48, 32)) == cell


@pytest.mark.parametrize(
    ("y", "x"), [(-0.1, 5), (48, 5), (5, 32), (5, -1), (float("nan"), 5)], ids=["above", "below", "right", "left", "NaN"]
)
def test_point_outside_the_photo_is_refused(y: float, x: float) -> None:
    with pytest.raises(OptionError, match=r"lies outside the photo of 32 x 48 pixels \(X,Y from the top left\)"):
        whole(48, 32, (48, 32)).patch_at(y, x, (3, 2), Box(0, 0, 48, 32))


def test_point_outside_the_crop_is_refused_with_the_visible_range() -> None:
    geometry = Geometry((100, 300), (100, 100), Box(0, 100, 100, 200))
    with pytest.raises(
        OptionError, match=r"pixel 99,10 was cropped away: the model received x 100 to 200 and y 0 to 100.*resize='fit'"
    ):
        geometry.patch_at(10, 99, (4, 4), Box(0, 0, 100, 100))


def test_point_beyond_the_last_full_patch_is_refused() -> None:
    with pytest.raises(OptionError, match="the model received x 0 to 224"):
        whole(230, 230, (230, 230)).patch_at(10, 226, (14, 14), Box(0, 0, 224, 224))


@pytest.mark.parametrize(
    ("photo", "side", "window"),
    [
        pytest.param((0, 5), (4, 4), Box(0, 0, 1, 1), id="photo"),
        pytest.param((5, 5), (4, 0), Box(0, 0, 1, 1), id="input"),
        pytest.param((5, 5), (4, 4), Box(3, 0, 3, 1), id="flat window"),
        pytest.param((5, 5), (4, 4), Box(0, 2, 3, 1), id="window turned inside out"),
    ],
)
def test_empty_side_is_refused(photo: tuple[int, int], side: tuple[int, int], window: Box) -> None:
    with pytest.raises(ShapeError, match="must be positive, got"):
        Geometry(photo, side, window)


@quick
@given(geometries())
def test_geometry_round_trips_through_json(geometry: Geometry) -> None:
    assert Geometry.from_dict(json.loads(json.dumps(dataclasses.asdict(geometry)))) == geometry


@quick
@given(geometries(), SIDES, SIDES, st.floats(0, 1), st.floats(0, 1))
def test_resized_geometry_maps_relative_positions_to_the_same_input(
    geometry: Geometry, height: int, width: int, down: float, across: float
) -> None:
    other = geometry.resized((height, width))
    expected = geometry.to_input(down * geometry.photo[0], across * geometry.photo[1])
    assert other.photo == (height, width)
    assert other.to_input(down * height, across * width) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("other", "common"),
    [
        pytest.param(Box(2, 3, 20, 30), Box(2, 3, 10, 10), id="overlap"),
        pytest.param(Box(20, 0, 30, 10), Box(20, 0, 20, 10), id="below"),
        pytest.param(Box(0, 0, 10, 10), Box(0, 0, 10, 10), id="same"),
        pytest.param(Box(0, -9, 5, -3), Box(0, 0, 5, 0), id="left"),
    ],
)
def test_intersection_is_the_common_part_or_empty(other: Box, common: Box) -> None:
    assert Box(0, 0, 10, 10).intersect(other) == common
