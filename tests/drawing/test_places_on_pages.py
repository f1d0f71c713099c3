"""Places and sizes of panels, texts and color bars on pages of panels, and of the parts of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from visattn.core.drawing import matrices, pages
from visattn.core.drawing.colormaps import table
from visattn.core.drawing.matrices import matrix_page
from visattn.core.drawing.pages import FAINT, INK, Bar, Cell, captioned, draw_bar, sheet, side_by_side
from visattn.core.drawing.text import clip_text, font_of, line_height, lines_of, text_width, wrap_text

RED, BLUE, GREEN = (255, 0, 0), (0, 0, 255), (0, 255, 0)
H11, H12, H15 = (line_height(font_of(size)) for size in (11, 12, 15))
Text = tuple[str, tuple[float, float], tuple[int, int, int], int, str]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Text]:
    """Record each text: what, where, color, size and anchor."""
    found: list[Text] = []
    draw = ImageDraw.ImageDraw.text

    def text(self: Any, xy: Any, text: str, fill: Any, font: Any, anchor: str = "la") -> None:
        found.append((text, xy, fill, font.size, anchor))
        draw(self, xy, text, fill, font, anchor=anchor)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return found


def plain(width: int, height: int, color: tuple[int, int, int] = RED) -> Image.Image:
    return Image.new("RGB", (width, height), color)


def place(page: Image.Image, color: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a color."""
    rows, columns = np.nonzero((np.asarray(page) == color).all(-1))
    left, top = int(columns.min()), int(rows.min())
    return left, top, int(columns.max()) + 1 - left, int(rows.max()) + 1 - top


# ---- sheets -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("panel", "columns", "sizes"),
    [
        (100, 1, (15, 12, 11)),
        (119, 1, (15, 12, 11)),
        (120, 1, (15, 12, 12)),
        (304, 1, (21, 17, 15)),
        (320, 2, (22, 18, 16)),
        (640, 1, (22, 18, 16)),
        (400, 12, (69, 54, 30)),
        (200, 20, (59, 46, 15)),
        (300, 12, (52, 41, 23)),
    ],
)
def test_texts_grow_with_panel_and_page(written: list[Text], panel: int, columns: int, sizes: tuple[int, ...]) -> None:
    row: list[Cell | None] = [Cell(plain(panel, 9), "caption", "heading"), *[None] * (columns - 1)]
    sheet([row], panel=panel, title="title", row_labels=["row"], column_labels=["column"], notes=["note"])
    found = {text: size for text, _, _, size, _ in written}
    title, label, caption = sizes
    assert found == {
        "title": title,
        "row": label,
        "column": label,
        "heading": label,
        "caption": caption,
        "note": caption,
    }


def test_parts_of_a_page_lie_below_each_other(written: list[Text]) -> None:
    rows: list[list[Cell | None]] = [
        [Cell(plain(150, 60), "one\ntwo", "A"), Cell(plain(300, 180, BLUE), "three")],
        [None, Cell(plain(150, 40, GREEN), "four"), None],
    ]
    page = sheet(
        rows,
        panel=150,
        title="title",
        notes=["first note", "second note"],
        row_labels=["r0", "row one"],
        column_labels=["c0", "c1", "c2"],
        bar=Bar("viridis", ("0", "1", "2"), "unit"),
    )
    left = 18 + text_width("row one", font_of(12)) + 8
    top = 18 + (H15 + 4) + 8 + (H12 + 6)
    head = H12 + 4
    high = head + 90 + 2 * (H12 + 4)
    below = top + high + 8
    assert place(page, RED) == (left, top + head, 150, 60)
    assert place(page, BLUE) == (left + 158, top + head, 150, 90)
    assert place(page, GREEN) == (left + 158, below, 150, 40)
    bar = below + 40 + (H12 + 4) + 8
    notes = bar + 18 + 2 * H12 + 14
    width = left + 3 * 158 - 8 + 18
    assert page.size == (width, notes + 2 * (H12 + 3) + 18)
    across = min(width - left - 18, 420)
    assert written == [
        ("title", (18, 18), INK, 15, "la"),
        ("c0", (left + 75, top - 6), INK, 12, "ms"),
        ("c1", (left + 233, top - 6), INK, 12, "ms"),
        ("c2", (left + 391, top - 6), INK, 12, "ms"),
        ("r0", (18, top + high / 2), INK, 12, "lm"),
        ("A", (left, top), INK, 12, "la"),
        ("one", (left + 1, top + head + 62), FAINT, 12, "la"),
        ("two", (left + 1, top + head + 62 + H12 + 4), FAINT, 12, "la"),
        ("three", (left + 159, top + head + 92), FAINT, 12, "la"),
        ("row one", (18, below + (40 + H12 + 4) / 2), INK, 12, "lm"),
        ("four", (left + 159, below + 42), FAINT, 12, "la"),
        ("0", (left, bar + 17), INK, 12, "la"),
        ("1", (left + (across - 1) / 2, bar + 17), INK, 12, "ma"),
        ("2", (left + across - 1, bar + 17), INK, 12, "ra"),
        ("unit", (left, bar + 20 + H12), FAINT, 12, "la"),
        ("first note", (18, notes), FAINT, 12, "la"),
        ("second note", (18, notes + H12 + 3), FAINT, 12, "la"),
    ]
    ramp = np.asarray(page)[bar : bar + 14, left : left + across]
    assert (ramp[:, 0] == table("viridis")[0]).all()
    assert (ramp[:, -1] == table("viridis")[255]).all()


def test_a_bare_page_is_its_panels_with_margins(written: list[Text]) -> None:
    page = sheet([[Cell(plain(200, 70)), Cell(plain(200, 50, BLUE)), Cell(plain(200, 90, GREEN))]], panel=200)
    assert page.size == (18 + 3 * 208 - 8 + 18, 18 + 90 + 8 + 18)
    assert place(page, RED) == (18, 18, 200, 70)
    assert place(page, GREEN) == (18 + 416, 18, 200, 90)
    assert not written
    assert page.getpixel((0, 0)) == (255, 255, 255)


def test_a_page_is_at_least_420_pixels_wide() -> None:
    assert sheet([[Cell(plain(200, 70))]], panel=200).width == 420
    assert sheet([[Cell(plain(384, 70))]], panel=384).width == 420
    assert sheet([[Cell(plain(385, 70))]], panel=385).width == 421
    assert sheet([], panel=100).size == (420, 36)


def test_a_row_of_empty_cells_has_no_height() -> None:
    assert sheet([[None, None], [Cell(plain(100, 30))]], panel=100).height == 18 + 0 + 8 + 30 + 8 + 18


def test_titles_and_notes_are_wrapped_to_the_page_between_its_margins(written: list[Text]) -> None:
    words = "some words that fill more than a single line of this page "
    sheet([[Cell(plain(200, 70))]], panel=200, title=words * 3, notes=[words * 3])
    titles = [entry for entry in written if entry[2] == INK]
    notes = [entry for entry in written if entry[2] == FAINT]
    assert [entry[0] for entry in titles] == wrap_text(words * 3, font_of(15), 384)
    assert [entry[0] for entry in notes] == wrap_text(words * 3, font_of(12), 384)
    assert len(titles) > 2
    assert [entry[1] for entry in titles] == [(18, 18 + i * (H15 + 4)) for i in range(len(titles))]


def test_long_headings_and_captions_end_at_the_width_of_the_panel(written: list[Text]) -> None:
    long = "abcdefghij" * 9
    sheet([[Cell(plain(200, 70), long, long)]], panel=200)
    assert [entry[0] for entry in written] == [clip_text(long, font_of(12), 200)] * 2


def test_side_by_side_labels_each_picture(written: list[Text]) -> None:
    page = side_by_side([plain(80, 20), plain(80, 20, BLUE)], ["a", "b"], panel=160, title="t")
    assert [entry[0] for entry in written] == ["t", "a", "b"]
    assert place(page, BLUE) == (18 + 168, 18 + H15 + 4 + 8 + H12 + 6, 160, 40)
    assert place(side_by_side([plain(80, 20)]), RED) == (18, 18, 320, 80)


@pytest.mark.parametrize(("size", "height"), [((200, 30), 15), ((50, 20), 40), ((1000, 4), 1), ((100, 33), 33)])
def test_pictures_keep_their_proportions(size: tuple[int, int], height: int) -> None:
    picture = plain(*size)
    scaled = pages._to_width(picture, 100)
    assert scaled.size == (100, height)
    assert (scaled is picture) is (size[0] == 100)


# ---- color bars -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "x", "width"), [(300, 40, 242), (478, 40, 420), (900, 40, 420)])
def test_a_bar_ends_at_the_margin_or_after_420_pixels(written: list[Text], page: int, x: int, width: int) -> None:
    drawn = plain(page, 90)
    draw_bar(drawn, ImageDraw.Draw(drawn), Bar("gray", ("a", "b", "c", "d", "e"), "u"), x, 10, font_of(11))
    pixels = np.asarray(drawn)[10:24, x : x + width]
    assert (pixels == pixels[:1]).all()
    assert (pixels[0, [0, -1], 0]).tolist() == [0, 255]
    assert pixels[0, width // 2].tolist() == pixels[0, width // 2, :1].tolist() * 3
    assert (np.asarray(drawn)[[9, 24], x] == RED).all()
    assert (np.asarray(drawn)[15, x + width] == RED).all()
    assert [entry[1][0] for entry in written[:-1]] == pytest.approx([x + i / 4 * (width - 1) for i in range(5)])
    assert [entry[4] for entry in written] == ["la", "ma", "ma", "ma", "ra", "la"]
    assert written[-1] == ("u", (x, 30 + H11), FAINT, 11, "la")


def test_a_bar_of_one_tick_has_it_at_the_left(written: list[Text]) -> None:
    drawn = plain(300, 90)
    draw_bar(drawn, ImageDraw.Draw(drawn), Bar("gray", ("a",), "u"), 40, 10, font_of(11))
    assert written[0] == ("a", (40, 27), INK, 11, "la")


def test_a_ramp_steps_evenly_from_the_lowest_to_the_highest_color() -> None:
    ramp = np.asarray(pages._ramp("gray", 5, 3))
    assert ramp[..., 0].tolist() == [[0, 64, 128, 191, 255]] * 3


# ---- captions ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "ramp"), [(40, 16), (67, 16), (68, 17), (400, 100)])
def test_a_slim_bar_is_a_quarter_of_the_page(width: int, ramp: int) -> None:
    assert pages._ramp_width(width) == ramp


@pytest.mark.parametrize(("width", "size"), [(300, 12), (584, 12), (585, 13), (900, 20)])
def test_a_caption_has_a_slim_bar_with_its_label_beside_it_and_then_lines(written: list[Text], width: int, size: int) -> None:
    height = 2 * width // 3
    page = captioned(plain(width, height), ["a line", "another"], Bar("gray", ("lo", "mid", "hi!"), "unit"))
    font = font_of(size)
    line, top = line_height(font), height + 8
    start, ramp = 16 + text_width("lo", font), width // 4
    assert page.size == (width, height + 8 + 3 * (line + 4) + 8)
    assert place(page, RED) == (0, 0, width, height)
    assert written == [
        ("lo", (8, top), INK, size, "la"),
        ("hi!", (start + ramp + 8, top), INK, size, "la"),
        ("unit", (start + ramp + 8 + text_width("hi!", font) + 16, top), FAINT, size, "la"),
        ("a line", (8, top + line + 4), INK, size, "la"),
        ("another", (8, top + 2 * (line + 4)), INK, size, "la"),
    ]
    pixels = np.asarray(page)[top + line // 4 : top + line // 4 + max(4, line // 2), start : start + ramp, 0]
    assert (pixels == np.linspace(0, 255, ramp).round()).all()
    assert (
        np.asarray(page)[top + line // 4 - 1, start, 0] == np.asarray(page)[top + line // 4 + max(4, line // 2), start, 0] == 255
    )


@pytest.mark.parametrize(("width", "height", "size"), [(900, 600, 20), (2000, 300, 21), (8000, 1000, 76), (600, 4000, 13)])
def test_text_below_a_panorama_fits_its_area(written: list[Text], width: int, height: int, size: int) -> None:
    captioned(plain(width, height), ["word"])
    assert [entry[3] for entry in written] == [size]


@pytest.mark.parametrize(("width", "factor"), [(1, 224), (32, 7), (64, 4), (112, 2), (113, 2), (223, 2), (224, 1), (3000, 1)])
def test_small_pictures_are_enlarged_to_224_pixels(width: int, factor: int) -> None:
    assert pages.enlargement(plain(width, 300)) == factor


def test_a_label_without_room_beside_the_bar_is_the_first_line_below_it(written: list[Text]) -> None:
    bar = Bar("gray", ("0", "1"), "a label of some length")
    font = font_of(12)
    texts = sum(text_width(text, font) for text in ("0", "1", bar.label))
    least = next(width for width in range(60, 539) if 40 + texts + width // 4 + 8 <= width)
    for width in (least, least - 1):
        captioned(plain(width, 50), ["x"], bar)
    step = line_height(font) + 4
    labels = [entry[1:3] for entry in written if entry[0] == bar.label]
    assert labels[0][1] == FAINT
    assert [labels[1]] == [((8.0, 58.0 + step), INK)]
    assert [entry[1] for entry in written if entry[0] == "x"] == [(8, 58 + step), (8, 58 + 2 * step)]


def test_a_caption_of_lines_alone_begins_below_the_picture(written: list[Text]) -> None:
    page = captioned(plain(300, 50), ["word " * 30])
    lines = wrap_text("word " * 30, font_of(12), 284)
    assert len(lines) > 1
    assert [entry[:2] for entry in written] == [(line, (8, 58 + i * (H12 + 4))) for i, line in enumerate(lines)]
    assert page.height == 50 + 16 + len(lines) * (H12 + 4)


def test_a_caption_keeps_a_margin_on_both_sides(written: list[Text]) -> None:
    words, font = "a few words of many lengths " * 6, font_of(12)
    width = next(width for width in range(200, 300) if wrap_text(words, font, width - 16) != wrap_text(words, font, width - 8))
    captioned(plain(width, 50), [words])
    assert [entry[0] for entry in written] == wrap_text(words, font, width - 16)


# ---- text -------------------------------------------------------------------------------------------------------------------------


def test_a_line_is_as_wide_as_its_letters_and_a_pixel() -> None:
    font = font_of(12)
    assert text_width("star", font) == int(font.getlength("star")) + 1
    box = font.getbbox("Ag|")
    assert line_height(font) == int(box[3] - box[1]) + 2


def test_words_are_wrapped_where_the_next_one_would_pass_the_width() -> None:
    font = font_of(12)
    width = text_width("red star", font)
    assert wrap_text("red star", font, width) == ["red star"]
    assert wrap_text("red star", font, width - 1) == ["red", "star"]
    assert wrap_text("  ", font, 50) == []
    assert wrap_text("incomprehensibilities a", font, 5) == ["incomprehensibilities", "a"]


def test_an_empty_text_has_no_lines() -> None:
    assert (lines_of(""), lines_of("a"), lines_of("a\n\nb")) == ([], ["a"], ["a", "", "b"])


def test_a_line_is_cut_only_if_it_is_too_wide() -> None:
    font = font_of(12)
    width = text_width("red star", font)
    assert clip_text("red star", font, width) == "red star"
    assert clip_text("red star", font, width - 1) == "red st…"
    assert clip_text("red star", font, text_width("red …", font)) == "red…"
    assert clip_text("red star", font, 0) == "…"
    assert clip_text("l" * 9, font, text_width("l…", font)) == "l…"
    assert clip_text("l" * 9, font, text_width("l…", font) - 1) == "…"


# ---- matrices ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record what matrices pass to the page."""
    found: list[Any] = []

    def sheet(rows: Any, **options: Any) -> Image.Image:
        found.append((rows[0][0].picture, options))
        return plain(9, 9)

    monkeypatch.setattr(matrices, "sheet", sheet)
    return found


def test_a_small_matrix_is_enlarged_by_a_whole_number(cells: list[Any]) -> None:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    matrix_page(weights, ["cls", "reg"], side=20, title="t", notes=["n"])
    picture, options = cells[0]
    assert picture.size == (18, 12)
    assert (np.asarray(picture)[:6, :6] == table("viridis")[0]).all()
    assert (np.asarray(picture)[6:, 12:] == table("viridis")[255]).all()
    assert options["panel"] == 18
    assert options["bar"] == Bar("viridis", ("0", "2.5", ">= 5"), "attention")
    where = "rows: queries, top to bottom; columns: keys, left to right; both cls, reg, then patches in raster order"
    assert options["notes"] == (where, "n")


@pytest.mark.parametrize(("side", "size"), [(7, (7, 4)), (6, (4, 2)), (4, (4, 2)), (3, (3, 2)), (14, (14, 8)), (20, (14, 8))])
def test_a_large_matrix_is_averaged_over_blocks(cells: list[Any], side: int, size: tuple[int, int]) -> None:
    matrix_page(np.arange(28, dtype=np.float32).reshape(4, 7), [], side=side)
    picture, options = cells[0]
    assert picture.size == size
    said = [note for note in options["notes"] if "mean of" in note]
    shrink = {6: 2, 4: 2, 3: 3}.get(side)
    assert said == ([f"each pixel is the mean of {shrink} x {shrink} weights"] if shrink else [])
    assert options["notes"][0].endswith("both patches in raster order")


def test_blocks_at_the_border_are_means_of_what_is_there(cells: list[Any]) -> None:
    weights = np.array([[1, 3, 5], [5, 7, 9], [10, 20, 40]], np.float32)
    matrix_page(weights, [], side=2)
    assert cells[0][1]["bar"].ticks[0] == "4"
    assert float(cells[0][1]["bar"].ticks[2].removeprefix(">= ")) == pytest.approx(40, rel=0.05)
    reds = np.asarray(cells[0][0]).astype(int)
    low, high = 4.0, float(np.percentile([4, 7, 15, 40], 99.5))
    for (row, column), value in {(0, 0): 4, (0, 1): 7, (1, 0): 15, (1, 1): 40}.items():
        level = round(255 * (min(value, high) - low) / (high - low))
        assert np.abs(reds[row, column] - table("viridis")[level]).max() <= 4


def test_an_even_matrix_is_black(cells: list[Any]) -> None:
    matrix_page(np.full((2, 3), 0.25, np.float32), [], side=6)
    assert cells[0][0].size == (6, 4)
    assert np.asarray(cells[0][0]).max() == 0
    assert cells[0][1]["bar"].ticks == ("0.25", "0.25", ">= 0.25")


def test_a_single_peak_keeps_its_range(cells: list[Any]) -> None:
    weights = np.zeros((20, 30), np.float32)
    weights[3, 4] = 2
    matrix_page(weights, [], side=30)
    assert cells[0][1]["bar"].ticks == ("0", "1", ">= 2")
    assert (np.asarray(cells[0][0])[3, 4] == table("viridis")[255]).all()
