from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from visattn._support.opencv import cv2
from visattn.core.drawing.colormaps import table
from visattn.core.drawing.filmstrips import animation, entropies, filmstrip
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap
from visattn.core.records import TokenLayout
from visattn.errors import MapError, OptionError, ShapeError

GREEN = (0, 200, 0)
INPUT = (32, 48)
PANEL = 120
WHOLE = Geometry((90, PANEL), INPUT, Box(0, 0, 90, PANEL))
WORDS = ("a", "red", "star")


def make_map(values: Any, words: tuple[str, ...] | None = None, axes: tuple[str, ...] = ("word",)) -> AttentionMap:
    tensor = torch.as_tensor(values, dtype=torch.float32)
    layout = TokenLayout("places", (), tuple(tensor.shape[len(axes) :]), Box(0, 0, *INPUT))
    return AttentionMap(tensor, axes, layout, {} if words is None else {"word": words}, "attention")


def constant(count: int = 3, words: tuple[str, ...] | None = None) -> AttentionMap:
    return make_map(torch.full((count, 2, 3), 1 / 6), words)


def random_map(words: tuple[str, ...] = WORDS, grid: tuple[int, int] = (2, 3)) -> AttentionMap:
    return make_map(torch.rand(len(words), *grid, generator=torch.Generator().manual_seed(0)), words)


def one_hot(row: int, column: int, grid: tuple[int, int]) -> torch.Tensor:
    values = torch.zeros(*grid)
    values[row, column] = 1
    return values


def green(height: int = 90, width: int = PANEL) -> Image.Image:
    return Image.new("RGB", (width, height), GREEN)


def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, PANEL, 3), dtype=np.uint8))


def places(page: Image.Image) -> list[tuple[int, int, int, int]]:
    """Return left, top, width and height of every single-color panel, in reading order."""
    mask = (np.asarray(page) == GREEN).all(axis=2).astype(np.uint8)
    _, _, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
    return sorted(((int(x), int(y), int(w), int(h)) for x, y, w, h, _ in stats[1:]), key=lambda box: (box[1], box[0]))


def parts(page: Image.Image, height: int = 90, **options: Any) -> list[NDArray[np.int16]]:
    """Return the pixels of each panel of a strip of three words; positions come from a same-size figure with single-color panels."""
    geometry = Geometry((height, PANEL), INPUT, Box(0, 0, height, PANEL))
    twin = filmstrip(green(height), constant(words=WORDS), geometry, panel=PANEL, **options)
    return [np.asarray(page)[y : y + h, x : x + w].astype(np.int16) for x, y, w, h in places(twin)]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Record every drawn text and its width."""
    found: list[tuple[str, float]] = []
    draw = ImageDraw.ImageDraw.text

    def text(self: ImageDraw.ImageDraw, xy: Any, text: str, fill: Any = None, font: Any = None, **options: Any) -> None:
        found.append((text, font.getlength(text)))
        draw(self, xy, text, fill, font, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return found


# ---- panels -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("height", "width", "window", "grid", "cell"),
    [
        pytest.param(90, 120, Box(0, 0, 90, 120), (2, 3), (1, 0), id="the whole photo"),
        pytest.param(180, 240, Box(0, 0, 180, 240), (3, 4), (0, 3), id="a larger photo"),
        pytest.param(45, 60, Box(0, 0, 45, 60), (5, 2), (4, 1), id="a smaller photo"),
        pytest.param(60, 240, Box(0, 75, 60, 165), (2, 3), (1, 2), id="the middle of a wide photo"),
        pytest.param(240, 90, Box(90, 0, 150, 90), (4, 2), (0, 0), id="the middle of a tall photo"),
        pytest.param(90, 120, Box(-31, -11, 121, 131), (3, 5), (1, 2), id="a padded photo"),
    ],
)
def test_one_hot_map_colors_exactly_its_cell(
    height: int, width: int, window: Box, grid: tuple[int, int], cell: tuple[int, int]
) -> None:
    values = torch.stack([one_hot(*cell, grid), torch.full(grid, 0.5), torch.full(grid, 0.5)])
    geometry = Geometry((height, width), INPUT, window)
    page = filmstrip(green(height, width), make_map(values, WORDS), geometry, panel=PANEL, opacity=0.5)
    tall = round(height * PANEL / width)
    _, drawn, untouched, _ = parts(page, tall, notes=[])
    hit, miss = (0.5 * table("inferno")[level] + 0.5 * np.array(GREEN) for level in (255, 0))
    expected = np.zeros((tall, PANEL, 3))
    for y in range(tall):
        for x in range(PANEL):
            down = ((y + 0.5) * height / tall - window.top) / window.height * grid[0]
            across = ((x + 0.5) * width / PANEL - window.left) / window.width * grid[1]
            seen = 0 <= down < grid[0] and 0 <= across < grid[1]
            expected[y, x] = GREEN if not seen else hit if (int(down), int(across)) == cell else miss
    assert np.abs(drawn - expected).max() <= 1
    assert (untouched == GREEN).all()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10, 12, 60])
def test_strip_has_the_photo_and_a_panel_for_each_word(count: int) -> None:
    page = filmstrip(green(), constant(count, tuple(f"w{i}" for i in range(count))), WHOLE, panel=64)
    boxes = places(page)
    assert [box[2:] for box in boxes] == [(64, 48)] * (count + 1)
    assert len({box[0] for box in boxes}) <= 7
    last_row = sum(box[1] == boxes[-1][1] for box in boxes)
    assert last_row == len({box[0] for box in boxes}) or count > 7


@pytest.mark.parametrize(("columns", "rows"), [(1, 4), (2, 2), (3, 2), (9, 1)])
def test_number_of_columns_is_as_given(columns: int, rows: int) -> None:
    boxes = places(filmstrip(green(), constant(), WHOLE, panel=64, columns=columns))
    assert len(boxes) == 4
    assert len({box[1] for box in boxes}) == rows


def test_photo_comes_first_and_is_untouched() -> None:
    page = filmstrip(noise(), random_map(), WHOLE, panel=PANEL)
    photo, *words = parts(page)
    assert (photo == np.asarray(noise())).all()
    assert all((word != photo).any() for word in words)


def test_words_follow_in_their_order() -> None:
    values = torch.stack([one_hot(0, number, (2, 3)) for number in range(3)])
    _, *words = parts(filmstrip(green(), make_map(values, WORDS), WHOLE, panel=PANEL, opacity=1))
    hottest = [np.nonzero((word == table("inferno")[255]).all(axis=2))[1].mean() for word in words]
    assert hottest == pytest.approx([19.5, 59.5, 99.5])


def test_constant_words_show_the_photo_and_are_labeled_constant(written: list[tuple[str, float]]) -> None:
    rounding = torch.full((3, 8, 8), 1 / 64)
    rounding[1, 0, 0] += 2e-9  # rounding error of a softmax
    assert rounding[1, 0, 0] > rounding[1, 0, 1]
    page = filmstrip(green(), make_map(rounding, WORDS), WHOLE, panel=PANEL)
    assert len(places(page)) == 4
    assert [text for text, _ in written].count("constant 0.0156") == 3


def test_own_ranges_are_written(written: list[tuple[str, float]]) -> None:
    values = [[[0.0, 0.1, 0.2]], [[0.25, 0.5, 1.0]], [[0.5, 0.5, 0.5]]]
    page = filmstrip(green(), make_map(values, WORDS), WHOLE, panel=PANEL, opacity=1)
    texts = [text for text, _ in written]
    assert {"0 to 0.2", "0.25 to 1", "constant 0.5", "panel minimum", "panel maximum"} <= set(texts)
    assert [word[0, -1].tolist() for word in parts(page)[1:3]] == [table("inferno")[255].tolist()] * 2


def test_strengths_fade_the_maps_into_the_photo() -> None:
    values = [[[0.0, 0.1, 0.2]], [[0.0, 0.5, 1.0]], [[0.0, 0.5, 1.0]]]
    options: dict[str, Any] = {"panel": PANEL, "opacity": 1}
    whole = parts(filmstrip(green(), make_map(values, WORDS), WHOLE, **options))
    faded = parts(filmstrip(green(), make_map(values, WORDS), WHOLE, strengths=(1.0, 0.25, 0.0), **options))
    assert (faded[0] == whole[0]).all()
    assert (faded[1] == whole[1]).all()
    assert np.abs(faded[2] - (0.25 * whole[2] + 0.75 * np.array(GREEN))).max() <= 1
    assert (faded[3] == GREEN).all()


@pytest.mark.parametrize(
    ("strengths", "message"),
    [((1.0, 1.0), "strengths must have one entry for each of the 3 words, got 2"), ((1.0, 1.0, 1.5), r"strengths\[2\] must be")],
)
def test_wrong_strengths_are_refused(strengths: tuple[float, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        filmstrip(green(), constant(words=WORDS), WHOLE, panel=PANEL, strengths=strengths)


def test_shared_scale_has_numbers_and_distinguishes_words(written: list[tuple[str, float]]) -> None:
    values = [[[0.0, 0.1, 0.2]], [[0.0, 0.5, 1.0]], [[0.2, 0.2, 0.2]]]
    page = filmstrip(green(), make_map(values, WORDS), WHOLE, panel=PANEL, opacity=1, shared_scale=True)
    assert {"0", "0.25", "0.5", "0.75", "1", "attention, one scale for all panels"} <= {text for text, _ in written}
    assert "constant 0.2" in {text for text, _ in written}
    assert [word[0, -1].tolist() for word in parts(page)[1:]] == [table("inferno")[level].tolist() for level in (51, 255, 51)]


def test_smoothing_is_stated_and_not_applied_to_maps_of_one_cell(written: list[tuple[str, float]]) -> None:
    values = torch.stack([one_hot(0, 1, (2, 3)), torch.rand(2, 3), torch.full((2, 3), 0.2)])
    raw = filmstrip(green(), make_map(values, WORDS), WHOLE, panel=PANEL)
    smooth = filmstrip(green(), make_map(values, WORDS), WHOLE, panel=PANEL, interpolation="bilinear")
    texts = [text for text, _ in written]
    assert texts.count("smoothed: bilinear interpolation between the centers of 2 x 3 cells") == 1
    assert texts.count("not smoothed: maps with a single nonzero cell") == 1
    before, after = parts(raw), parts(smooth)
    assert (before[1] == after[1]).all()
    assert (before[2] != after[2]).any()


# ---- chosen cells -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [(0, 0), (1, 1), (1, 2)])
@pytest.mark.parametrize("window", [Box(0, 0, 90, PANEL), Box(0, 15, 90, 105)], ids=["whole", "crop"])
def test_chosen_cell_is_boxed(cell: tuple[int, int], window: Box) -> None:
    geometry = Geometry((90, PANEL), INPUT, window)
    attention_map = random_map()
    plain = parts(filmstrip(noise(), attention_map, geometry, panel=PANEL))
    boxed = parts(filmstrip(noise(), attention_map, geometry, panel=PANEL, chosen_cells=[None, cell, None]))
    assert (plain[1] == boxed[1]).all()
    assert (plain[3] == boxed[3]).all()
    height, width = 45, round(window.width / 3)
    top, left = cell[0] * height, round(window.left) + cell[1] * width
    for y, x in [(top, left), (top, left + width - 1), (top + height - 1, left), (top + height - 1, left + width // 2)]:
        assert boxed[2][y, x].min() >= 190  # a thin, antialiased line
    rows, columns = np.nonzero((plain[2] != boxed[2]).any(axis=2))
    assert rows.min() >= top - 3
    assert rows.max() < top + height + 3
    assert columns.min() >= max(left - 3, window.left)
    assert columns.max() < min(left + width + 3, window.right)
    inside = slice(top + 4, top + height - 4), slice(left + 4, left + width - 4)
    assert (plain[2][inside] == boxed[2][inside]).all()


def test_legend_explains_the_box_only_if_there_is_one(written: list[tuple[str, float]]) -> None:
    filmstrip(green(), random_map(), WHOLE, chosen_cells=[None, None, None])
    assert "box: the cell that hard attention chose" not in {text for text, _ in written}
    filmstrip(green(), random_map(), WHOLE, chosen_cells=[(0, 0), None, None])
    assert "box: the cell that hard attention chose" in {text for text, _ in written}


# ---- texts ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["word", "fact"])
def test_word_is_above_its_panel_and_its_note_below(place: str) -> None:
    words, facts = list(WORDS), ["one", "two", "three"]
    before = filmstrip(green(), constant(words=tuple(words)), WHOLE, panel=PANEL, word_notes=facts)
    (words if place == "word" else facts)[1] = "changed"
    after = filmstrip(green(), constant(words=tuple(words)), WHOLE, panel=PANEL, word_notes=facts)
    left, top, width, height = places(before)[2]
    rows, columns = np.nonzero((np.asarray(before) != np.asarray(after)).any(axis=2))
    assert columns.min() >= left
    assert columns.max() < left + width
    assert (rows.max() < top and rows.min() > top - 30) if place == "word" else rows.min() >= top + height


def test_words_word_notes_title_and_notes_are_written(written: list[tuple[str, float]]) -> None:
    facts = ["entropy 0.41   beta 0.83", "entropy 0.20   beta 0.10", "entropy 1.00   beta 0.50"]
    filmstrip(green(), random_map(), WHOLE, word_notes=facts, title="a red star", notes=["a note"])
    texts = [text for text, _ in written]
    assert [text for text in texts if text in WORDS] == list(WORDS)
    assert [text for text in texts if text in facts] == facts
    assert {"a red star", "a note"} <= set(texts)


def test_map_without_words_numbers_them(written: list[tuple[str, float]]) -> None:
    filmstrip(green(), constant(2), WHOLE)
    assert {"word 0", "word 1"} <= {text for text, _ in written}


ODD = {
    "markup": "</script><b>",
    "control": "a\nb\x1b[31m\0",
    "right to left": "\u05e9\u05dc\u05d5\u05dd\u202e",
    "emoji": "\U0001f986\u200d\U0001f525",
    "undecodable": "\udcff",
    "empty": "",
    "long": "supercalifragilisticexpialidocious" * 300,
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_any_word_can_be_written(text: str, written: list[tuple[str, float]]) -> None:
    page = filmstrip(green(), constant(1, (text,)), WHOLE, panel=PANEL, word_notes=[text], title=text[:40], notes=[text[:40]])
    assert [box[2:] for box in places(page)] == [(PANEL, 90)] * 2
    assert all(line.isprintable() for line, _ in written)
    if len(text) > PANEL:
        clipped = [width for line, width in written if line.endswith("…")]
        assert len(clipped) == 2
        assert max(clipped) <= PANEL


def test_part_outside_the_crop_is_named(written: list[tuple[str, float]]) -> None:
    filmstrip(green(), random_map(), Geometry((90, PANEL), INPUT, Box(0, 15, 90, 105)))
    assert "no color: outside the model's input" in {text for text, _ in written}


# ---- refusals ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [filmstrip, animation])
@pytest.mark.parametrize(
    ("attention_map", "options", "message"),
    [
        pytest.param(
            make_map(torch.rand(2, 3, 2, 3), axes=("batch", "word")),
            {},
            r"only axis is 'word', got \('batch', 'word'\)",
            id="batch left",
        ),
        pytest.param(make_map(torch.rand(3, 2, 3), axes=("head",)), {}, r"only axis is 'word', got \('head',\)", id="no words"),
        pytest.param(make_map(torch.rand(2, 3), axes=()), {}, r"only axis is 'word', got \(\)", id="no axis"),
        pytest.param(make_map(torch.rand(0, 2, 3)), {}, "shows 1 to 200 words, got 0", id="empty"),
        pytest.param(make_map(torch.rand(201, 2, 3)), {}, "shows 1 to 200 words, got 201. Pass", id="too long"),
        pytest.param(make_map(torch.rand(2, 2, 3), WORDS), {}, "labels must name 2 words, got 3", id="labels"),
        pytest.param(random_map(), {"word_notes": ["one"]}, "must have one entry for each of the 3 words, got 1", id="facts"),
        pytest.param(
            random_map(),
            {"chosen_cells": [None] * 4},
            "chosen_cells must have one entry for each of the 3 words, got 4",
            id="cells",
        ),
        pytest.param(
            random_map(),
            {"chosen_cells": [None, (2, 0), None]},
            r"cells\[1\] must be .* 2 x 3 grid, got \(2, 0\)",
            id="below the grid",
        ),
        pytest.param(
            random_map(),
            {"chosen_cells": [(0, -1), None, None]},
            r"chosen_cells\[0\] must be .* got \(0, -1\)",
            id="left of the grid",
        ),
        pytest.param(random_map(), {"panel": 20}, "panel must be a number from 64 to 1024", id="panel"),
        pytest.param(constant(), {"opacity": 2}, "opacity must be a number from 0 to 1", id="opacity"),
        pytest.param(random_map(), {"colormap": "infero"}, "unknown colormap 'infero'", id="colormap"),
        pytest.param(random_map(), {"interpolation": "spline"}, "unknown interpolation 'spline'", id="interpolation"),
        pytest.param(random_map(), {"normalize": "max"}, "unknown normalization 'max'", id="normalization"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: Any, attention_map: AttentionMap, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        draw(green(), attention_map, WHOLE, **options)


def test_options_of_filmstrips_and_animations_are_checked() -> None:
    with pytest.raises(OptionError, match="columns must be 1 or more, got 0"):
        filmstrip(green(), random_map(), WHOLE, columns=0)
    with pytest.raises(OptionError, match="milliseconds must be a number from 20"):
        animation(green(), random_map(), WHOLE, milliseconds=0)


def test_geometry_of_another_photo_is_refused() -> None:
    with pytest.raises(ShapeError, match="must have the geometry's 120 x 90 pixels, got 90 x 120"):
        filmstrip(green(120, 90), random_map(), WHOLE)


def test_strip_of_pixels_is_refused() -> None:
    with pytest.raises(OptionError, match="too narrow"):
        filmstrip(green(6000, 10), random_map(), Geometry((6000, 10), INPUT, Box(0, 0, 6000, 10)))


# ---- the animation ----------------------------------------------------------------------------------------------------------------


def frames(data: bytes) -> list[NDArray[np.int16]]:
    with Image.open(io.BytesIO(data)) as film:
        assert film.format == "WEBP"
        assert film.info["loop"] == 0
        found = []
        for number in range(getattr(film, "n_frames", 1)):
            film.seek(number)
            found.append(np.asarray(film.convert("RGB")).astype(np.int16))
        return found


def test_animation_shows_the_photo_and_then_the_panels_of_the_strip(written: list[tuple[str, float]]) -> None:
    options: dict[str, Any] = {"panel": PANEL, "chosen_cells": [None, (1, 2), None], "word_notes": ["one", "two", "three"]}
    film = frames(animation(noise(), random_map(), WHOLE, title="a title", notes=["a note"], **options))
    texts = [text for text, _ in written]
    strip = parts(filmstrip(noise(), random_map(), WHOLE, **options), word_notes=["x"] * 3)
    assert len(film) == 4
    assert all((shown[:90] == expected).all() for shown, expected in zip(film, strip, strict=True))
    assert [text for text in texts if text in ("a title", *WORDS)] == ["a title", *WORDS]
    assert [text for text in texts if text in options["word_notes"]] == options["word_notes"]
    assert texts.count("a note") == 4
    assert " ".join(texts).count("box: the cell that hard attention chose") == 4


def test_word_is_dark_on_a_white_band_below_the_picture() -> None:
    words, others = (frames(animation(green(), constant(1, (word,)), WHOLE, panel=PANEL))[1] for word in ("star", "disk"))
    rows, _ = np.nonzero((words != others).any(axis=2))
    assert rows.min() >= 90
    assert words[rows.min() : rows.max() + 1].max() == 255
    assert words[rows.min() : rows.max() + 1].min() < 60
    assert (words[-1] == 255).all()


@pytest.mark.parametrize("count", [1, 5])
def test_equal_words_get_separate_frames(count: int) -> None:
    assert len(frames(animation(green(), constant(count, ("a",) * count), WHOLE, panel=64))) == count + 1


def test_frames_have_the_given_duration() -> None:
    with Image.open(io.BytesIO(animation(green(), constant(words=WORDS), WHOLE, panel=64, milliseconds=250))) as film:
        film.seek(1)
        film.load()
        assert film.info["duration"] == 250


# ---- entropies --------------------------------------------------------------------------------------------------------------------


def slow_entropy(values: list[float]) -> float:
    return sum(-value / sum(values) * math.log(value / sum(values)) for value in values if value > 0)


@pytest.mark.parametrize("scale", [1.0, 7.0])
@pytest.mark.parametrize("normalized", [False, True])
def test_entropies_follow_their_definition(scale: float, normalized: bool) -> None:
    values = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(3))
    values[0, 0] = 0
    expected = [slow_entropy(word.flatten().tolist()) / (math.log(6) if normalized else 1) for word in values]
    assert entropies(make_map(scale * values), normalized=normalized) == pytest.approx(expected, rel=1e-6)


def test_entropy_is_0_for_one_cell_and_1_for_a_uniform_map() -> None:
    values = torch.stack([one_hot(1, 1, (2, 3)), torch.full((2, 3), 0.25)])
    assert entropies(make_map(values), normalized=True) == pytest.approx([0, 1])
    assert entropies(make_map(values)) == pytest.approx([0, math.log(6)])


@pytest.mark.parametrize("normalized", [False, True])
def test_entropy_of_a_single_cell_is_0(normalized: bool) -> None:
    assert [str(value) for value in entropies(make_map([[[0.3]]]), normalized=normalized)] == ["0.0"]


@pytest.mark.parametrize("values", [[[[0.5, -0.1]]], [[[0.0, 0.0]]]], ids=["negative", "no mass"])
def test_entropy_of_a_map_that_is_not_a_distribution_is_refused(values: Any) -> None:
    with pytest.raises(MapError, match="at least 0 with a positive sum"):
        entropies(make_map(values))


def test_entropies_of_a_batch_are_refused() -> None:
    with pytest.raises(OptionError, match=r"map\.at\(batch=0\)"):
        entropies(make_map(torch.rand(2, 3, 2, 3), axes=("batch", "word")))
