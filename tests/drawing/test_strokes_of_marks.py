"""Sizes and places of the strokes of marks: what is drawn where, how thick, and in which order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tests.drawing.overlaying import heatmap, noise
from visattn._support.opencv import cv2
from visattn.core.drawing import marks
from visattn.core.drawing.marks import draw_box, draw_glimpses, draw_window, inside_only, outline, ring, spotlight
from visattn.core.geometry import Box, Geometry

WHITE, BLACK, CYAN = (255, 255, 255), (0, 0, 0), (0, 230, 255)


class Spy:
    """OpenCV whose drawing functions note their arguments but the picture."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(cv2, name)
        if not callable(function):
            return function

        def called(*args: Any, **options: Any) -> Any:
            plain = [arg.tolist() if isinstance(arg, np.ndarray) else arg for arg in args[1:]] if name != "addWeighted" else []
            self.calls.append((name, *plain))
            return function(*args, **options)

        return called

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    made = Spy()
    monkeypatch.setattr(marks, "cv2", made)
    return made


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record each text and each dot: its place, and its text or radius."""
    found: list[tuple[Any, ...]] = []
    draw, dot = ImageDraw.ImageDraw.text, ImageDraw.ImageDraw.circle

    def text(self: Any, xy: Any, text: str, fill: Any, font: Any, **options: Any) -> None:
        found.append((xy, text, fill, font.size, options))
        draw(self, xy, text, fill, font, **options)

    def circle(self: Any, xy: Any, radius: float, fill: Any, outline: Any) -> None:
        found.append((xy, radius, fill, outline))
        dot(self, xy, radius, fill, outline)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    monkeypatch.setattr(ImageDraw.ImageDraw, "circle", circle)
    return found


def black(width: int = 300, height: int = 200) -> Image.Image:
    return Image.new("RGB", (width, height))


# ---- sizes ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "height", "size"), [(300, 200, 300), (200, 300, 300), (301, 200, 300), (900, 201, 301), (250, 200, 250)]
)
def test_marks_grow_with_the_long_side_up_to_one_and_a_half_of_the_short_one(width: int, height: int, size: int) -> None:
    assert marks._size(black(width, height)) == size


@pytest.mark.parametrize(("side", "stroke"), [(10, 1), (740, 1), (760, 2), (1240, 2), (1260, 3)])
def test_strokes_are_a_pixel_for_each_500_of_the_side(side: int, stroke: int) -> None:
    assert marks._stroke(black(side, side)) == stroke


@pytest.mark.parametrize(
    ("box", "corners"),
    [
        (Box(0, 10, 100, 130), ((10, 0), (129, 99))),
        (Box(0.5, 1.5, 4.5, 7.5), ((1, 0), (6, 3))),
        (Box(0.6, 1.6, 4.6, 7.6), ((2, 1), (7, 4))),
        (Box(-3, -2, 5, 7), ((-2, -3), (6, 4))),
    ],
)
def test_a_box_is_drawn_along_the_outermost_pixels_whose_centers_it_contains(box: Box, corners: Any) -> None:
    assert marks._corners(box) == corners


# ---- outlines ---------------------------------------------------------------------------------------------------------------------


def regions(*sizes: int) -> NDArray[np.bool_]:
    """Build rows of pixels, one for each size, with a free row between them."""
    mask = np.zeros((2 * len(sizes) + 1, 24), bool)
    for place, size in enumerate(sizes):
        mask[2 * place + 1, 1 : size + 1] = True
    return mask


def test_regions_of_nine_tenths_of_the_pixels_stay_and_smaller_ones_go() -> None:
    mask = regions(8, 9, 20)
    assert marks._without_specks(mask, 10).sum(1).tolist() == [0, 0, 0, 9, 0, 20, 0]
    assert marks._without_specks(mask, 9).sum(1).tolist() == [0, 0, 0, 9, 0, 20, 0]
    assert marks._without_specks(mask, 8).sum(1).tolist() == [0, 8, 0, 9, 0, 20, 0]


def test_a_mask_of_specks_alone_stays_as_it_is() -> None:
    assert marks._without_specks(regions(3, 5), 10).sum() == 8


def test_regions_that_touch_at_a_corner_are_two() -> None:
    mask = np.zeros((8, 9), bool)
    mask[1:4, 1:4], mask[4, 4], mask[6, 7] = True, True, True
    assert marks._without_specks(mask, 9).sum() == 9


def test_the_empty_ground_is_no_region() -> None:
    mask = np.zeros((8, 9), bool)
    mask[2:5, 2:6] = True
    assert marks._without_specks(mask, 12).tolist() == mask.tolist()


def test_each_region_of_a_mask_has_a_white_line_on_a_dark_one(spy: Spy) -> None:
    mask = np.zeros((40, 60), bool)
    mask[5:15, 5:20] = mask[25:35, 40:50] = True
    drawn = np.asarray(outline(Image.new("RGB", (60, 40), (90, 90, 90)), mask))
    assert [call[1:] for call in spy.of("drawContours")] == [(-1, BLACK, 3, cv2.LINE_AA), (-1, WHITE, 1, cv2.LINE_AA)]
    assert min(drawn[5, 10].min(), drawn[25, 45].min()) > 200
    assert drawn[6, 10].max() < 60
    assert drawn[20, 30].tolist() == [90, 90, 90]


def test_lines_of_a_large_picture_are_thicker(spy: Spy) -> None:
    outline(black(1000, 900), np.ones((900, 1000), bool))
    assert [call[3] for call in spy.of("drawContours")] == [6, 2]


def test_one_half_lies_inside_a_mask_of_a_heatmap() -> None:
    grid = np.zeros((6, 9), np.float32)
    grid[1:5, 2:7] = 1
    whole = heatmap(grid)
    half = heatmap(grid)
    half.values[...] = np.where(whole.values >= 0.5, 0.5, 0.49)
    assert outline(noise(), half).tobytes() == outline(noise(), whole).tobytes()
    assert spotlight(noise(), half).tobytes() == spotlight(noise(), whole).tobytes()


def test_smallest_region_is_three_patches_of_the_part_that_the_model_received() -> None:
    grid = np.zeros((4, 6), np.float32)
    grid[0, :2], grid[2, :3] = 1, 1
    place = Geometry((60, 90), (64, 96), Box(10, 15, 50, 75))  # patches of 10 x 10 pixels
    heat, photo = heatmap(grid, place), noise(60, 90)
    heat.values[...] = 0
    heat.values[38:50, 15:75] = heat.values[15:25, 20:46] = 1
    changed = (np.asarray(outline(photo, heat)) != np.asarray(photo)).any(-1)
    assert changed[38, 20:70].all()
    assert not changed[:34].any()  # 260 pixels are less than 0.9 * 300
    heat.values[15:25, 46:48] = 1
    changed = (np.asarray(outline(photo, heat)) != np.asarray(photo)).any(-1)
    assert changed[15, 22:46].all()


# ---- spotlights -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "edge"), [(1, 1), (40, 2)])
def test_spotlight_shows_the_photo_one_stroke_inside_the_mask(scale: int, edge: int) -> None:
    height, width = 20 * scale, 24 * scale
    photo = Image.new("RGB", (width, height), (200, 100, 50))
    mask = np.zeros((height, width), bool)
    top, left, bottom, right = 5 * scale, 6 * scale, 14 * scale, 19 * scale
    mask[top:bottom, left:right] = True
    lit = (np.asarray(spotlight(photo, mask)) == (200, 100, 50)).all(-1)
    rows, columns = np.nonzero(lit)
    assert (rows.min(), rows.max() + 1) == (top + edge, bottom - edge)
    assert (columns.min(), columns.max() + 1) == (left + edge, right - edge)
    assert lit.sum() == (bottom - top - 2 * edge) * (right - left - 2 * edge)


def test_spotlight_leaves_three_tenths_of_the_gray_outside() -> None:
    mask = np.zeros((30, 40), bool)
    mask[20:28, 30:38] = True
    assert np.asarray(spotlight(Image.new("RGB", (40, 30), (100, 100, 100)), mask))[2, 3].tolist() == [30, 30, 30]


# ---- rings and windows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height", "radius", "stroke"), [(30, 20, 4, 1), (360, 300, 6, 1), (1200, 900, 20, 2)])
def test_a_ring_is_drawn_around_each_point_dark_first(spy: Spy, width: int, height: int, radius: int, stroke: int) -> None:
    ring(black(width, height), [(5.9, 7.2), (11, 13)])
    assert spy.of("circle") == [
        ((7, 5), radius, BLACK, 3 * stroke, cv2.LINE_AA),
        ((7, 5), radius, CYAN, stroke, cv2.LINE_AA),
        ((13, 11), radius, BLACK, 3 * stroke, cv2.LINE_AA),
        ((13, 11), radius, CYAN, stroke, cv2.LINE_AA),
    ]


def test_without_points_the_picture_itself_is_returned() -> None:
    picture = black()
    assert ring(picture, []) is picture
    assert ring(picture, [(9, 9)]) is not picture


@pytest.mark.parametrize(("width", "height", "stroke"), [(300, 200, 1), (1200, 900, 2)])
def test_a_window_is_closed_and_has_a_dot_at_its_first_corner(spy: Spy, width: int, height: int, stroke: int) -> None:
    draw_window(black(width, height), [(10.4, 20.6), (11, 80), (60, 81), (61.5, 19)])
    points = [[[21, 10], [80, 11], [81, 60], [19, 62]]]
    lines = [(list(map(np.ndarray.tolist, call[0])), *call[1:]) for call in spy.of("polylines")]
    assert lines == [
        (points, True, BLACK, 3 * stroke, cv2.LINE_AA),
        (points, True, WHITE, stroke, cv2.LINE_AA),
    ]
    assert spy.of("circle") == [
        ([21, 10], 5 * stroke, BLACK, -1, cv2.LINE_AA),
        ([21, 10], 3 * stroke, WHITE, -1, cv2.LINE_AA),
    ]


# ---- boxes ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height", "stroke", "font"), [(300, 200, 1, 12), (1200, 900, 2, 30)])
def test_a_box_has_its_label_two_strokes_inside_its_corner(
    spy: Spy, written: list[Any], width: int, height: int, stroke: int, font: int
) -> None:
    draw_box(black(width, height), Box(20, 30, 80, 110), "cat")
    assert spy.of("rectangle") == [((30, 20), (109, 79), BLACK, 3 * stroke), ((30, 20), (109, 79), WHITE, stroke)]
    place = (30 + 2 * stroke, 20 + 2 * stroke)
    assert written == [(place, "cat", WHITE, font, {"anchor": "lt", "stroke_width": 2 * stroke, "stroke_fill": BLACK})]


@pytest.mark.parametrize(("seen", "place"), [(None, (2, 2)), (Box(15, 25, 90, 120), (27, 17)), (Box(-9, -8, 90, 120), (-3, -2))])
def test_label_of_a_box_stays_in_what_is_seen(written: list[Any], seen: Box | None, place: tuple[int, int]) -> None:
    draw_box(black(), Box(-4, -5, 80, 110), "cat", seen)
    assert written[0][0] == place


def test_a_box_without_a_label_has_none(written: list[Any]) -> None:
    drawn = np.asarray(draw_box(black(), Box(20, 30, 80, 110)))
    assert not written
    assert drawn[20, 50].tolist() == drawn[79, 50].tolist() == drawn[40, 30].tolist() == drawn[40, 109].tolist() == [255] * 3
    assert drawn[100, 50].max() == drawn[40, 60].max() == 0


def test_only_what_is_seen_is_drawn_on() -> None:
    before, drawn = black(30, 20), Image.new("RGB", (30, 20), WHITE)
    lit = np.asarray(inside_only(Box(3, 5, 11, 18), drawn, before)).any(-1)
    expected = np.zeros((20, 30), bool)
    expected[3:11, 5:18] = True
    assert (lit == expected).all()
    assert inside_only(Box(0, 0, 20, 30), drawn, before) is drawn
    assert np.asarray(before).max() == 0


# ---- glimpses ---------------------------------------------------------------------------------------------------------------------

GLIMPSES = [[Box(20, 30, 81, 111), Box(0, 10, 100, 130)], [Box(90, 100, 150, 180), Box(70, 80, 170, 200)]]


def test_glimpses_are_boxes_with_lines_between_their_centers(spy: Spy, written: list[Any]) -> None:
    draw_glimpses(black(), GLIMPSES)
    faint = [((10, 0), (129, 99), WHITE, 1), ((80, 70), (199, 169), WHITE, 1)]
    first, second = ((30, 20), (110, 80)), ((100, 90), (179, 149))
    assert spy.of("rectangle") == [
        *faint,
        (*first, BLACK, 3),
        (*second, BLACK, 3),
        (*first, WHITE, 1),
        (*second, WHITE, 1),
    ]
    line = [[[1120, 800], [2232, 1912]]]  # sixteenths of a pixel, from pixel centers
    assert spy.of("polylines") == [
        (line, False, BLACK, 3, cv2.LINE_AA, 4),
        (line, False, CYAN, 1, cv2.LINE_AA, 4),
    ]
    assert written == [
        ((70, 50), 10, CYAN, BLACK),
        ((70, 50), "1", BLACK, 12, {"anchor": "mm"}),
        ((140, 120), 10, CYAN, BLACK),
        ((140, 120), "2", BLACK, 12, {"anchor": "mm"}),
    ]


def test_coarse_boxes_cover_two_fifths_of_the_photo() -> None:
    drawn = np.asarray(draw_glimpses(Image.new("RGB", (300, 200), (100, 50, 0)), GLIMPSES))
    assert drawn[99, 40].tolist() == [162, 132, 102]
    assert drawn[95, 40].tolist() == [100, 50, 0]


@pytest.mark.parametrize(
    ("side", "digit", "radius"), [(150, 40, 32), (117, 39, 31), (30, 10, 8), (27, 9, 7), (26, None, 2), (6, None, 2)]
)
def test_numbers_fit_a_third_of_the_finest_box_and_become_dots_below_9_pixels(
    written: list[Any], side: int, digit: int | None, radius: int
) -> None:
    boxes = [[Box(100, 100, 100 + side, 400)], [Box(300, 500, 700, 800)]]
    draw_glimpses(black(1200, 900), boxes)
    sizes = [entry[3] for entry in written if isinstance(entry[1], str)]
    assert sizes == ([] if digit is None else [digit] * 2)
    assert [entry[1] for entry in written if not isinstance(entry[1], str)] == [radius] * 2


@pytest.mark.parametrize(
    ("seen", "places"),
    [
        (None, [(10, 10), (289, 189), (10, 189), (289, 10)]),
        (Box(20, 30, 180, 270), [(40, 30), (259, 169), (40, 169), (259, 30)]),
        (Box(20, 30, 25, 36), [(30, 20)] * 4),
        (Box(20, 30, 42, 52), [(40, 30), (41, 31), (40, 31), (41, 30)]),
    ],
)
def test_numbers_stay_in_what_is_seen(written: list[Any], seen: Box | None, places: list[tuple[int, int]]) -> None:
    outside = [Box(-90, -80, -30, -20), Box(230, 330, 290, 390), Box(230, -80, 290, -20), Box(-90, 330, -30, 390)]
    draw_glimpses(black(), [[box] for box in outside], seen)
    assert [entry[0] for entry in written if isinstance(entry[1], str)] == places


@pytest.mark.parametrize("seen", [Box(5, 6, 5, 106), Box(5, 6, 105, 6.5)])
def test_a_picture_of_which_nothing_is_seen_is_copied(written: list[Any], seen: Box) -> None:
    picture = noise()
    copied = draw_glimpses(picture, GLIMPSES, seen)
    assert copied is not picture
    assert copied.tobytes() == picture.tobytes()
    assert not written


@pytest.mark.parametrize("seen", [Box(0, 0, 1, 300), Box(0, 0, 200, 1)])
def test_a_line_of_one_pixel_is_drawn_on(written: list[Any], seen: Box) -> None:
    draw_glimpses(black(), GLIMPSES, seen)
    assert len(written) == 4


def test_without_glimpses_nothing_is_drawn(written: list[Any]) -> None:
    assert draw_glimpses(noise(), []).tobytes() == noise().tobytes()
    assert not written
