"""Numbers behind figures of panels: frames of films, cells of words, strips and captions of gates, rows of contact sheets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch import nn

import visattn
from tests.drawing.overlaying import heatmap
from visattn import nn as ours
from visattn.core.drawing import filmstrips, gate_pages, sheets
from visattn.core.drawing.colormaps import table
from visattn.core.drawing.filmstrips import animation, entropies, filmstrip
from visattn.core.drawing.pages import FAINT, INK, Bar, Cell
from visattn.core.drawing.sheets import contact_sheet
from visattn.core.drawing.style import Style
from visattn.core.drawing.text import clip_text, font_of, line_height, text_width
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap
from visattn.core.pipeline.inputs import prepare
from visattn.core.records import TokenLayout
from visattn.errors import OptionError

WHOLE = Geometry((90, 120), (32, 48), Box(0, 0, 90, 120))


def words(count: int, grid: tuple[int, int] = (2, 3), axes: tuple[str, ...] = ("word",)) -> AttentionMap:
    values = torch.rand(count, *grid, generator=torch.Generator().manual_seed(0))
    return AttentionMap(values, axes, TokenLayout("places", (), grid, Box(0, 0, 32, 48)), {}, "attention")


def photo(width: int = 120, height: int = 90) -> Image.Image:
    return Image.new("RGB", (width, height), (0, 200, 0))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record each text: what, where, color, size and anchor."""
    found: list[tuple[Any, ...]] = []

    def text(self: Any, xy: Any, text: str, fill: Any, font: Any, anchor: str = "la") -> None:
        found.append((text, xy, fill, font.size, anchor))

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return found


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[list[list[Cell | None]]]:
    """Record the rows of each page."""
    found: list[list[list[Cell | None]]] = []

    def sheet(rows: Any, **options: Any) -> Image.Image:
        found.append([list(row) for row in rows])
        return photo()

    for module in (filmstrips, gate_pages, sheets):
        monkeypatch.setattr(module, "sheet", sheet)
    return found


# ---- films ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "large", "small"), [(120, 16, 11), (256, 16, 11), (320, 20, 12), (640, 40, 24)])
def test_lines_of_a_frame_lie_below_each_other(written: list[Any], width: int, large: int, small: int) -> None:
    cell = Cell(photo(width), "one\ntwo", "star")
    page = filmstrips._frame(cell, "2 / 3", 3, Bar("gray", ("a", "b"), "u"), ["n1", "n2"])
    word, line = line_height(font_of(large)) + 6, line_height(font_of(small)) + 4
    above = 90 + 8 + word + 3 * line + 8
    foot = above + 18 + 2 * line + 8
    right = 18 + min(width - 36, 420) - 1
    assert page.size == (width, foot + 2 * line + 8)
    assert written == [
        ("star", (18, 98), INK, large, "la"),
        ("2 / 3", (width - 18, 100), FAINT, small, "ra"),
        ("one", (18, 98 + word), FAINT, small, "la"),
        ("two", (18, 98 + word + line), FAINT, small, "la"),
        ("a", (18, above + 17), INK, small, "la"),
        ("b", (right, above + 17), INK, small, "ra"),
        ("u", (18, above + 20 + line - 4), FAINT, small, "la"),
        ("n1", (18, foot), FAINT, small, "la"),
        ("n2", (18, foot + line), FAINT, small, "la"),
    ]
    assert page.crop((0, 0, width, 90)).tobytes() == photo(width).tobytes()
    assert page.getpixel((0, 90)) == (255, 255, 255)


def test_a_long_word_ends_before_its_number(written: list[Any]) -> None:
    long = "abcdefghijk" * 9
    filmstrips._frame(Cell(photo(320), long, long), "2 / 3", 1, Bar("gray", ("a", "b"), "u"), [])
    room = 320 - 36 - text_width("2 / 3", font_of(12)) - 8
    assert [entry[0] for entry in written if entry[0].startswith("abc")] == [
        clip_text(long, font_of(20), room),
        clip_text(long, font_of(12), 284),
    ]


def test_a_film_begins_with_the_title_and_numbers_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[Any, ...]] = []

    def frame(cell: Cell, number: str, lines: int, bar: Bar, notes: Any) -> Image.Image:
        found.append((cell.heading, number, lines, bar.label, list(notes)))
        return photo()

    monkeypatch.setattr(filmstrips, "_frame", frame)
    animation(photo(), words(3), WHOLE, title="a title", word_notes=["n", "", ""], notes=["note"], milliseconds=20)
    assert found == [
        ("a title", "", 2, "attention", ["note"]),
        ("word 0", "1 / 3", 2, "attention", ["note"]),
        ("word 1", "2 / 3", 2, "attention", ["note"]),
        ("word 2", "3 / 3", 2, "attention", ["note"]),
    ]


def test_bounds_of_films_are_allowed_and_what_is_beyond_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filmstrips, "_frame", lambda *_: photo(20, 10))
    for good in (20, 60_000):
        assert animation(photo(), words(2), WHOLE, milliseconds=good).startswith(b"RIFF")
    for bad in (19, 60_001):
        with pytest.raises(OptionError, match="milliseconds must be a number from 20 to 60000"):
            animation(photo(), words(2), WHOLE, milliseconds=bad)


def test_defaults_of_films_and_strips(monkeypatch: pytest.MonkeyPatch, rows: list[Any]) -> None:
    sizes: list[int] = []
    durations: list[Any] = []

    def frame(cell: Cell, *_: Any) -> Image.Image:
        sizes.append(cell.picture.width)
        return photo(20, 10)

    monkeypatch.setattr(filmstrips, "_frame", frame)
    monkeypatch.setattr(Image.Image, "save", lambda *_, **options: durations.append(options))
    animation(photo(), words(2), WHOLE)
    filmstrip(photo(), words(2), WHOLE)
    assert sizes == [320] * 3
    assert [cell.picture.width for cell in rows[0][0]] == [160] * 3
    shown = {name: durations[0][name] for name in ("save_all", "duration", "loop", "lossless")}
    assert shown == {"save_all": True, "duration": 800, "loop": 0, "lossless": True}
    assert len(durations[0]["append_images"]) == 2


@pytest.mark.parametrize(("panel", "fine"), [(63, False), (64, True), (1024, True), (1025, False)])
def test_panels_of_a_strip_are_64_to_1024_pixels_wide(rows: list[Any], panel: int, fine: bool) -> None:
    if fine:
        filmstrip(photo(), words(1), WHOLE, panel=panel)
        assert rows[0][0][0].picture.width == panel
        return
    with pytest.raises(OptionError, match="panel must be a number from 64 to 1024"):
        filmstrip(photo(), words(1), WHOLE, panel=panel)


@pytest.mark.parametrize(
    ("count", "lengths"),
    [(1, [2]), (4, [5]), (5, [6]), (6, [7]), (7, [4, 4]), (8, [5, 4]), (10, [6, 5]), (11, [6, 6]), (13, [7, 7]), (19, [5] * 4)],
)
def test_rows_of_a_strip_are_full_if_they_can_be(rows: list[Any], count: int, lengths: list[int]) -> None:
    filmstrip(photo(), words(count), WHOLE, panel=64)
    assert [len(row) for row in rows[0]] == lengths
    assert [cell.heading for row in rows[0] for cell in row] == ["", *(f"word {i}" for i in range(count))]


def test_columns_of_a_strip_can_be_chosen(rows: list[Any]) -> None:
    filmstrip(photo(), words(4), WHOLE, panel=64, columns=2)
    filmstrip(photo(), words(1), WHOLE, panel=64, columns=1)
    assert [[len(row) for row in page] for page in rows] == [[2, 2, 1], [1, 1]]


def test_a_strip_shows_up_to_200_words() -> None:
    assert filmstrips._words(words(200))[199] == "word 199"
    assert filmstrips._words(words(1)) == ["word 0"]


def test_entropy_is_relative_to_the_number_of_cells() -> None:
    layout = TokenLayout("places", (), (1, 2), Box(0, 0, 32, 48))
    two = AttentionMap(torch.tensor([[[3.0, 3.0]], [[1.0, 3.0]]]), ("word",), layout, {}, "attention")
    assert entropies(two) == pytest.approx([0.693147, 0.562335], abs=1e-6)
    assert entropies(two, normalized=True) == pytest.approx([1, 0.811278], abs=1e-6)


PANELS = SimpleNamespace(
    geometry=Geometry((40, 90), (10, 12), Box(5, 8, 35, 80)),
    heat=heatmap(torch.zeros(1, 2, 3), Geometry((40, 90), (32, 48), Box(0, 0, 40, 90)), ("word",)),
)
CELLS = cast(AttentionMap, SimpleNamespace(layout=SimpleNamespace(grid=(2, 3), box=Box(2, 3, 8, 9))))


@pytest.mark.parametrize(("cell", "box"), [((0, 0), (11, 26, 20, 38)), ((1, 0), (20, 26, 29, 38)), ((1, 2), (20, 50, 29, 62))])
def test_mask_of_a_chosen_cell_is_its_part_of_the_photo(cell: tuple[int, int], box: tuple[int, int, int, int]) -> None:
    mask = filmstrips._box(cast(Any, PANELS), CELLS, cell, "x").values
    expected = np.zeros((40, 90))
    expected[box[0] : box[2], box[1] : box[3]] = 1
    assert mask.tolist() == expected.tolist()


def test_cells_of_part_of_an_input_pixel_are_masked_exactly() -> None:
    cells = cast(AttentionMap, SimpleNamespace(layout=SimpleNamespace(grid=(2, 3), box=Box(1, 2, 8, 10))))
    mask = filmstrips._box(cast(Any, PANELS), cells, (1, 1), "x").values
    rows, columns = np.nonzero(mask)  # rows 4.5 to 8 and columns 4.67 to 7.33 of the input
    assert (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1) == (18, 29, 36, 52)


@pytest.mark.parametrize("cell", [(-1, 0), (2, 0), (0, -1), (0, 3), (2, 3)])
def test_a_cell_beside_the_grid_is_refused(cell: tuple[int, int]) -> None:
    with pytest.raises(OptionError, match=r"x must be a \(row, column\) inside the 2 x 3 grid"):
        filmstrips._box(cast(Any, PANELS), CELLS, cell, "x")


def test_a_chosen_cell_keeps_its_line_beside_a_rest_of_one_cell(rows: list[Any]) -> None:
    filmstrip(photo(), words(1, (1, 4)), WHOLE, panel=120, chosen_cells=[(0, 1)])
    drawn = np.asarray(rows[0][0][1].picture)
    assert drawn[45, 30].min() > 150
    assert drawn[45, 59].min() > 150
    assert drawn[45, 2].max() < 255


# ---- contact sheets ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "columns"),
    [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 5),
        (6, 3),
        (7, 7),
        (8, 4),
        (9, 3),
        (10, 5),
        (11, 3),
        (12, 3),
        (13, 7),
        (16, 4),
        (24, 4),
        (64, 8),
    ],
)
def test_panels_of_one_axis_are_wrapped_into_full_and_roughly_square_rows(count: int, columns: int) -> None:
    assert sheets.wrap(count) == columns


@pytest.mark.parametrize(
    ("low", "high", "flat"),
    [
        (0, 0, True),
        (1, 1, True),
        (1, 1 + 5e-7, True),
        (1, 1 + 2e-6, False),
        (-1 - 5e-7, -1, True),
        (-1 - 2e-6, -1, False),
        (-2, 2, False),
    ],
)
def test_values_a_millionth_apart_are_the_same(low: float, high: float, flat: bool) -> None:
    assert sheets._flat(low, high) is flat


def test_a_photo_ten_times_as_high_as_wide_has_panels() -> None:
    def made(height: int) -> Any:
        place = Geometry((height, 30), (32, 48), Box(0, 0, height, 30))
        return sheets.Panels(photo(30, height), words(2), place, panel=30, shared_axes=(), style=Style())

    assert made(300).photo.size == (30, 300)
    with pytest.raises(OptionError, match="too narrow"):
        made(301)


def test_a_panel_has_at_least_one_row_of_pixels() -> None:
    place = Geometry((1, 500), (32, 48), Box(0, 0, 1, 500))
    made = sheets.Panels(photo(500, 1), words(2), place, panel=100, shared_axes=(), style=Style())
    assert made.photo.size == (100, 1)


def test_ticks_of_one_scale_are_even_steps_from_its_lowest_value() -> None:
    values = torch.tensor([[[1.0, 2.0, 3.0]], [[1.5, 1.5, 2.0]]])
    one = AttentionMap(values, ("word",), TokenLayout("places", (), (1, 3), Box(0, 0, 32, 48)), {}, "attention")
    made = sheets.Panels(photo(), one, WHOLE, panel=60, shared_axes=("word",), style=Style())
    assert made.bar().ticks == ("1", "1.5", "2", "2.5", "3")
    assert made.provenance().value_range == (1, 3)
    assert made.cell(word=1).caption == ""
    own = sheets.Panels(photo(), one, WHOLE, panel=60, shared_axes=("word",), style=Style(), ranges=True)
    assert (own.bar().ticks, own.cell(word=1).caption) == (("panel minimum", "panel maximum"), "1 to 3")
    each = sheets.Panels(photo(), one, WHOLE, panel=60, shared_axes=(), style=Style())
    assert [each.cell(word=i).caption for i in (0, 1)] == ["1 to 3", "1.5 to 2"]
    assert each.provenance().value_range == (1, 3)


def test_points_move_with_the_panel(monkeypatch: pytest.MonkeyPatch, rows: list[Any]) -> None:
    found: list[Any] = []

    def ring(picture: Image.Image, points: Any, color: Any) -> Image.Image:
        found.append((points, color))
        return picture

    monkeypatch.setattr(sheets, "ring", ring)
    place = Geometry((121, 240), (32, 48), Box(0, 0, 121, 240))
    contact_sheet(photo(240, 121), words(1), place, panel=60, points=[(40, 80), (0, 239)])
    assert found == [([(40 * 30 / 121, 20), (0, 59.75)], (255, 255, 255))]
    assert rows[0][0][0].picture.size == (60, 30)


# ---- gates ------------------------------------------------------------------------------------------------------------------------


def column(strip: Image.Image, x: int) -> list[list[int]]:
    return cast(list[list[int]], np.asarray(strip)[:, x].tolist())


def test_bars_of_gates_of_both_signs_start_at_the_line_of_zero() -> None:
    strip = gate_pages._strip(np.array([1, -1, 2, 0.5], np.float32), 101, "viridis")
    line, white = [200, 200, 205], [255, 255, 255]
    assert strip.size == (101, 24)  # 8 pixels for each unit from 2 to -1

    def bar(level: int) -> list[int]:
        return cast(list[int], table("viridis")[level].tolist())

    assert column(strip, 8) == [line] + [bar(200)] * 7 + [line] + [bar(200)] * 6 + [line] + [white] * 7 + [line]
    assert column(strip, 30) == [line] + [white] * 7 + [line] + [bar(100)] * 6 + [line] + [white] * 7 + [line]
    assert column(strip, 70) == [line] + [white] * 7 + [line] + [white] * 3 + [bar(50)] * 3 + [line] + [white] * 7 + [line]
    assert column(strip, 95) == [line] + [white] * 7 + [line] + [white] * 6 + [line] + [bar(0)] * 7 + [line]
    assert column(strip, 0) == column(strip, 100) == [line] * 24
    assert column(strip, 16)[2] == bar(200)
    assert column(strip, 17)[2] == white


def test_bars_of_positive_gates_start_at_the_bottom_with_a_line_at_1() -> None:
    strip = gate_pages._strip(np.array([2, 4], np.float32), 101, "gray")
    gray, white = [200, 200, 205], [255, 255, 255]
    assert column(strip, 20) == [gray] + [[200] * 3] * 16 + [gray] + [[200] * 3] * 5 + [gray]
    assert column(strip, 80) == [gray] + [white] * 11 + [[100] * 3] * 5 + [gray] + [[100] * 3] * 5 + [gray]


def test_the_top_of_gates_below_1_is_1() -> None:
    strip = gate_pages._strip(np.array([0.5, 0.25], np.float32), 101, "gray")
    assert [value[0] for value in column(strip, 20)] == [200] + [255] * 11 + [100] * 11 + [200]


@pytest.mark.parametrize(("width", "height"), [(64, 24), (120, 24), (125, 25), (300, 60)])
def test_a_strip_is_a_fifth_of_the_panel_high_and_at_least_24_pixels(width: int, height: int) -> None:
    assert gate_pages._strip(np.ones(3, np.float32), width, "gray").size == (width, height)


def test_pictures_are_stacked_with_four_pixels_between() -> None:
    page = gate_pages._stacked([photo(7, 5), photo(7, 9), photo(7, 2)])
    green = (np.asarray(page) == (0, 200, 0)).all(-1)
    assert page.size == (7, 24)
    assert np.flatnonzero(green.all(1)).tolist() == [*range(5), *range(9, 18), *range(22, 24)]
    assert (np.asarray(page)[~green] == 255).all()
    assert gate_pages._stacked([photo(7, 5)]).size == (7, 5)


def test_a_range_of_gates_is_told_unless_they_are_the_same() -> None:
    assert gate_pages._range(np.array([0.25, 0.5], np.float32)) == "0.25 to 0.5"
    assert gate_pages._range(np.array([0.25, 0.25], np.float32)) == "constant 0.25"


def test_corners_of_a_window_lie_on_the_photo() -> None:
    place = Geometry((40, 90), (10, 12), Box(5, 8, 35, 80))
    theta = torch.tensor([[[0.5, 0.0, 0.25], [0.0, 0.25, -0.5]], [[9.0, 9.0, 9.0], [9.0, 9.0, 9.0]]])
    found = gate_pages._corners(theta, Box(2, 3, 8, 9), place)
    assert found == [pytest.approx(point) for point in ((13.25, 39.5), (13.25, 57.5), (17.75, 57.5), (17.75, 39.5))]


def test_modules_with_gates_fill_rows_of_four(rows: list[Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), *(ours.CBAM(8) for _ in range(5)), nn.AdaptiveAvgPool2d(1)).eval()
    prepared = prepare(photo(72, 48), model)
    with torch.no_grad(), visattn.capture(model) as recording:
        model(prepared.pixels)
    gate_pages.gate_page(recording, prepared.photo, prepared.geometry, panel=64)
    assert [[cell.heading for cell in row] for row in rows[0]] == [["1", "2", "3", "4"], ["5"]]
    assert {cell.picture.size for row in rows[0] for cell in row} == {(64, 43 + 4 + 24)}
    captions = [cell.caption.split("\n") for row in rows[0] for cell in row]
    assert all(len(lines) == 2 and lines[1].startswith("8 channels ") for lines in captions)
