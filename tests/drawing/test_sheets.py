from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from visattn._support.opencv import cv2
from visattn.core.drawing.colormaps import table
from visattn.core.drawing.marks import outline
from visattn.core.drawing.matrices import matrix_page
from visattn.core.drawing.overlays import overlay
from visattn.core.drawing.pages import Bar, Cell, sheet, side_by_side
from visattn.core.drawing.sheets import Panels, contact_sheet
from visattn.core.drawing.style import Style
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap
from visattn.core.records import TokenLayout
from visattn.errors import MapError, OptionError

GREEN = (0, 200, 0)
PANEL = 120
WHOLE = Geometry((90, PANEL), (32, 48), Box(0, 0, 90, PANEL))


def make_map(values: Any, axes: tuple[str, ...], meaning: str = "attention", **labels: tuple[str, ...]) -> AttentionMap:
    tensor = torch.as_tensor(values, dtype=torch.float32)
    grid = (int(tensor.shape[-2]), int(tensor.shape[-1]))
    return AttentionMap(tensor, axes, TokenLayout("tokens", (), grid, Box(0, 0, 32, 48)), labels, meaning)


def random_map(*sizes: int, axes: tuple[str, ...], **options: Any) -> AttentionMap:
    return make_map(torch.rand(*sizes, 2, 3, generator=torch.Generator().manual_seed(0)), axes, **options)


def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, PANEL, 3), dtype=np.uint8))


def green(width: int = PANEL, height: int = 90) -> Image.Image:
    return Image.new("RGB", (width, height), GREEN)


@dataclass
class Written:
    """Recorder of drawn texts and their positions."""

    texts: list[str] = field(default_factory=list)
    places: dict[str, tuple[float, float]] = field(default_factory=dict)
    widths: dict[str, float] = field(default_factory=dict)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    found = Written()
    draw = ImageDraw.ImageDraw.text

    def text(self: ImageDraw.ImageDraw, xy: Any, text: str, fill: Any = None, font: Any = None, **options: Any) -> None:
        found.texts.append(text)
        found.places[text] = (xy[0], xy[1])
        found.widths[text] = font.getlength(text)
        draw(self, xy, text, fill, font, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return found


def panels(page: Image.Image, color: tuple[int, int, int] = GREEN) -> list[tuple[int, int, int, int]]:
    """Return left, top, width and height of every single-color panel, in reading order."""
    mask = (np.asarray(page) == color).all(axis=2).astype(np.uint8)
    _, _, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
    boxes = [(int(x), int(y), int(width), int(height)) for x, y, width, height, _ in stats[1:]]
    return sorted(boxes, key=lambda box: (box[1], box[0]))


def part(page: Image.Image, box: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    left, top, width, height = box
    return np.asarray(page)[top : top + height, left : left + width]


# ---- figures ----------------------------------------------------------------------------------------------------------------------


def test_panels_are_in_rows_and_columns_and_none_entries_leave_gaps() -> None:
    page = sheet([[Cell(green()), Cell(green()), Cell(green())], [Cell(green()), None, Cell(green())]], panel=PANEL)
    boxes = panels(page)
    assert [box[2:] for box in boxes] == [(PANEL, 90)] * 5
    lefts = [box[0] for box in boxes]
    assert lefts == [lefts[0], lefts[1], lefts[2], lefts[0], lefts[2]]
    assert len({box[1] for box in boxes}) == 2


def test_pictures_are_scaled_to_the_panel_and_keep_their_shape() -> None:
    page = sheet([[Cell(green(400, 200)), Cell(green(30, 60))]], panel=100)
    assert [box[2:] for box in panels(page)] == [(100, 50), (100, 200)]


def test_rows_may_differ_in_length() -> None:
    page = sheet([[Cell(green())], [Cell(green()), Cell(green())]], panel=PANEL)
    assert len(panels(page)) == 3


@pytest.mark.parametrize("panel", [40, 224, 700])
def test_nothing_is_cut_off_the_page(panel: int) -> None:
    page = np.asarray(
        sheet(
            [[Cell(green(), "a caption"), Cell(green())]],
            panel=panel,
            title="a title " * 30,
            notes=["a note " * 60],
            row_labels=["layer 11"],
            column_labels=["head 0", "head 1"],
            bar=Bar("inferno", ("0", "1"), "attention"),
        )
    )
    edge = np.concatenate(
        [page[:6].reshape(-1, 3), page[-6:].reshape(-1, 3), page[:, :6].reshape(-1, 3), page[:, -6:].reshape(-1, 3)]
    )
    assert (edge == 255).all()


def test_labels_are_beside_their_rows_and_above_their_columns(written: Written) -> None:
    rows = [[Cell(green()), Cell(green())], [Cell(green()), Cell(green())]]
    page = sheet(rows, panel=PANEL, row_labels=["first", "second"], column_labels=["left", "right"])
    first, _, _, last = panels(page)
    assert written.places["left"][0] == pytest.approx(first[0] + PANEL / 2)
    assert written.places["right"][0] == pytest.approx(last[0] + PANEL / 2)
    assert written.places["left"][1] <= first[1]
    assert first[1] <= written.places["first"][1] <= first[1] + first[3]
    assert last[1] <= written.places["second"][1] <= last[1] + last[3]
    assert written.places["first"][0] + written.widths["first"] <= first[0]


def test_caption_longer_than_its_panel_is_clipped(written: Written) -> None:
    sheet([[Cell(green(), "a very long caption that no panel of this width can hold")]], panel=PANEL)
    assert written.texts[0].startswith("a very long")
    assert written.texts[0].endswith("…")
    assert max(written.widths.values()) <= PANEL


@pytest.mark.parametrize("part_of_page", ["title", "notes"])
def test_long_lines_are_wrapped_without_losing_words(part_of_page: str, written: Written) -> None:
    words = [f"word{i}" for i in range(80)]
    text = " ".join(words)
    page = sheet(
        [[Cell(green())]], panel=PANEL, title=text if part_of_page == "title" else "", notes=[text] * (part_of_page == "notes")
    )
    assert " ".join(written.texts).split() == words
    assert max(written.widths.values()) <= page.width


def test_bar_shows_the_full_colormap_from_left_to_right() -> None:
    page = np.asarray(sheet([[Cell(green())]], panel=PANEL, bar=Bar("inferno", ("0", "1"), "attention")))
    lowest, highest = table("inferno")[0], table("inferno")[255]
    _, low_x = np.nonzero((page == lowest).all(axis=2))
    _, high_x = np.nonzero((page == highest).all(axis=2))
    assert low_x.size
    assert high_x.size
    assert high_x.min() - low_x.max() > 300


@pytest.mark.parametrize("text", ["", "🦆 \u202e\udcff", "<b>", "x" * 300], ids=["empty", "odd", "markup", "long"])
def test_any_text_can_be_written(text: str) -> None:
    page = sheet([[Cell(green(), text)]], panel=PANEL, title=text, notes=[text], row_labels=[text[:20]], column_labels=[text])
    assert len(panels(page)) == 1


def test_side_by_side_puts_labels_above_pictures(written: Written) -> None:
    page = side_by_side([green(), green()], ["photo", "overlay"], panel=PANEL, title="both")
    assert len(panels(page)) == 2
    assert written.texts == ["both", "photo", "overlay"]


# ---- contact sheets ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [("layer", "head"), ("head", "layer")])
def test_sheet_of_two_axes_has_a_row_and_a_column_for_each_entry(rows: str, columns: str) -> None:
    constant = make_map(torch.zeros(2, 3, 2, 3), ("layer", "head"))
    boxes = panels(contact_sheet(green(), constant, WHOLE, rows=rows, columns=columns, panel=PANEL))
    count = {"layer": 2, "head": 3}
    assert len(boxes) == 6
    assert len({box[1] for box in boxes}) == count[rows]
    assert len({box[0] for box in boxes}) == count[columns]


def test_sheet_of_two_axes_is_labeled_by_their_names(written: Written) -> None:
    attention_map = random_map(2, 3, axes=("layer", "head"), layer=("blocks.4", "blocks.11"))
    contact_sheet(noise(), attention_map, WHOLE, rows="layer", columns="head", panel=PANEL, title="a title", notes=["a note"])
    assert {"a title", "a note", "blocks.4", "blocks.11", "head 0", "head 1", "head 2"} <= set(written.texts)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 7, 9, 11, 12, 16, 24])
def test_sheet_of_one_axis_is_wrapped_and_loses_no_panel(count: int, written: Written) -> None:
    constant = make_map(torch.zeros(count, 2, 3), ("head",))
    boxes = panels(contact_sheet(green(), constant, WHOLE, panel=PANEL))
    assert len(boxes) == count
    assert len({box[0] for box in boxes}) <= 8
    captions = [text for text in written.texts if text.startswith("head ")]
    assert [int(text.split()[1]) for text in captions] == list(range(count))


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_sheet_of_one_named_axis_is_a_row_or_a_column(axis: str) -> None:
    constant = make_map(torch.zeros(3, 2, 3), ("head",))
    options: dict[str, Any] = {axis: "head"}
    boxes = panels(contact_sheet(green(), constant, WHOLE, panel=PANEL, **options))
    assert len({box[1] for box in boxes}) == (3 if axis == "rows" else 1)
    assert len({box[0] for box in boxes}) == (1 if axis == "rows" else 3)


def twin_panels(sizes: tuple[int, ...], axes: tuple[str, ...], **options: Any) -> list[tuple[int, int, int, int]]:
    """Return the positions of panels, found in a figure of the same shape with single-color panels."""
    page = contact_sheet(green(), make_map(torch.zeros(*sizes, 2, 3), axes), WHOLE, panel=PANEL, **options)
    return panels(page)


@pytest.mark.parametrize("place", range(6))
def test_every_panel_is_the_overlay_of_its_own_values(place: int) -> None:
    attention_map = random_map(2, 3, axes=("layer", "head"))
    page = contact_sheet(noise(), attention_map, WHOLE, rows="layer", columns="head", panel=PANEL, opacity=0.7)
    box = twin_panels((2, 3), ("layer", "head"), rows="layer", columns="head")[place]
    heat = attention_map.at(layer=place // 3, head=place % 3).to_heatmap(WHOLE, "nearest")
    expected = np.asarray(overlay(noise(), heat, opacity=0.7, blend="constant")).astype(int)
    assert np.abs(part(page, box) - expected).max() <= 4


def test_shared_scale_darkens_the_weaker_panel_and_is_numbered(written: Written) -> None:
    attention_map = make_map([[[0.0, 0.1, 0.2], [0.0, 0.1, 0.2]], [[0.0, 0.5, 1.0], [0.0, 0.5, 1.0]]], ("head",))
    page = contact_sheet(noise(), attention_map, WHOLE, rows="head", panel=PANEL, shared_axes=("head",), opacity=1)
    weak, strong = (part(page, box) for box in twin_panels((2,), ("head",), rows="head", shared_axes=("head",)))
    assert weak[0, -1].tolist() == table("inferno")[51].tolist()  # 0.2 of 1
    assert strong[0, -1].tolist() == table("inferno")[255].tolist()
    assert {"0", "0.25", "0.5", "0.75", "1"} <= set(written.texts)
    assert "attention, one scale for all panels" in written.texts


def test_own_scales_are_written_under_their_panels(written: Written) -> None:
    attention_map = make_map([[[0.0, 0.1, 0.2]], [[0.25, 0.5, 1.0]]], ("head",))
    contact_sheet(noise(), attention_map, WHOLE, rows="head", panel=PANEL)
    assert {"0 to 0.2", "0.25 to 1", "panel minimum", "panel maximum"} <= set(written.texts)


def test_constant_panel_shows_the_photo_and_is_labeled_constant(written: Written) -> None:
    attention_map = make_map([[[0.5, 0.5, 0.5]], [[0.0, 0.5, 1.0]]], ("head",))
    page = contact_sheet(green(), attention_map, WHOLE, rows="head", panel=PANEL)
    assert len(panels(page)) == 1
    assert "constant 0.5" in written.texts


def test_signed_values_are_drawn_with_zero_in_the_middle() -> None:
    attention_map = make_map([[[-1.0, 0.0, 0.5]], [[-1.0, 0.0, 0.5]]], ("component",), meaning="cosine similarity")
    page = contact_sheet(noise(), attention_map, WHOLE, rows="component", panel=PANEL, opacity=1)
    first = part(page, twin_panels((2,), ("component",), rows="component")[0])
    assert first[0, 0].tolist() == table("blue-white-red")[0].tolist()
    assert first[0, PANEL // 2].tolist() in table("blue-white-red")[127:129].tolist()
    assert first[0, -1].tolist() in table("blue-white-red")[190:193].tolist()


def test_mass_is_outlined_and_explained(written: Written) -> None:
    attention_map = make_map([[[0.0, 0.0, 1.0]], [[1.0, 0.0, 0.0]]], ("head",))
    options: dict[str, Any] = {"rows": "head", "panel": PANEL, "opacity": 0.5}
    page = contact_sheet(noise(), attention_map, WHOLE, mass=0.6, **options)
    first = part(page, twin_panels((2,), ("head",), rows="head")[0])
    mask = np.zeros((90, PANEL), bool)
    mask[:, 80:] = True
    plain = overlay(noise(), attention_map.at(head=0).to_heatmap(WHOLE, "nearest"), opacity=0.5, blend="constant")
    assert np.abs(first - np.asarray(outline(plain, mask)).astype(int)).max() <= 4
    assert "the smallest region that holds 60% of the panel's sum" in " ".join(written.texts)


@pytest.mark.parametrize("place", [0, 1])
def test_points_are_ringed_on_every_panel_where_they_lie(place: int) -> None:
    attention_map = make_map([[[0.2, 0.2, 0.2]], [[0.2, 0.2, 0.2]]], ("head",))
    large = Geometry((180, 2 * PANEL), (32, 48), Box(0, 0, 180, 2 * PANEL))
    page = contact_sheet(green(2 * PANEL, 180), attention_map, large, rows="head", panel=PANEL, points=[(60, 100)])
    box = twin_panels((2,), ("head",), rows="head")[place]
    rows, columns = np.nonzero((part(page, box) != GREEN).any(axis=2))
    assert (rows.mean(), columns.mean()) == pytest.approx((30, 50), abs=1)


def test_panel_is_drawn_at_its_own_size_from_a_larger_photo() -> None:
    photo = Image.new("RGB", (1200, 900), GREEN)
    place = Geometry((900, 1200), (32, 48), Box(0, 0, 900, 1200))
    boxes = panels(contact_sheet(photo, make_map(torch.zeros(2, 2, 3), ("head",)), place, panel=PANEL))
    assert [box[2:] for box in boxes] == [(PANEL, 90)] * 2


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        pytest.param(("layer", "head"), {}, r"named as rows or columns: the map has layer, head, got none", id="none named"),
        pytest.param(("layer", "head"), {"rows": "layer"}, r"the map has layer, head, got layer", id="one named"),
        pytest.param(
            ("layer", "head"), {"rows": "head", "columns": "head"}, "named as rows or columns: the map has", id="one named twice"
        ),
        pytest.param(("head",), {"rows": "head", "columns": "head"}, "rows or columns", id="the only one named twice"),
        pytest.param(("head",), {"rows": "heads"}, "unknown axis 'heads'; did you mean 'head'", id="misspelled"),
        pytest.param(("head",), {"shared_axes": ("layer",)}, "unknown axis 'layer'", id="unknown shared"),
        pytest.param(("head",), {"mass": 1.5}, "mass must be a number from 0 to 1", id="mass"),
        pytest.param(("head",), {"colormap": "infero"}, "unknown colormap 'infero'", id="colormap"),
        pytest.param(("head",), {"interpolation": "spline"}, "unknown interpolation 'spline'", id="interpolation"),
        pytest.param((), {}, "a contact sheet needs one or two axes", id="no axis left"),
    ],
)
def test_wrong_option_is_refused(axes: tuple[str, ...], options: dict[str, Any], message: str) -> None:
    attention_map = random_map(*(2 for _ in axes), axes=axes)
    with pytest.raises(OptionError, match=message):
        contact_sheet(noise(), attention_map, WHOLE, panel=PANEL, **options)


def test_batch_is_refused() -> None:
    with pytest.raises(MapError, match=r"Choose one image of the batch"):
        contact_sheet(noise(), random_map(2, axes=("batch",)), WHOLE, rows="batch", panel=PANEL)


LARGE = """
import re
import resource
import torch
from PIL import Image
from visattn.core.drawing.sheets import Panels, contact_sheet
from visattn.errors import VisattnError
from visattn.core.drawing.style import Style
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap
from visattn.core.records import TokenLayout
def peak():  # in MB; ru_maxrss is the parent's
    return int(re.search("VmHWM: *([0-9]+)", open("/proc/self/status").read().replace("\t", " "))[1]) // 1024
def page(width, height, *sizes):
    layout = TokenLayout("tokens", (), (37, 37), Box(0, 0, 518, 518))
    attention_map = AttentionMap(torch.rand(*sizes, 37, 37), ("layer", "head"), layout, {}, "attention")
    place = Geometry((height, width), (518, 518), Box(0, 0, height, width))
    return contact_sheet(photo, attention_map, place, rows="layer", columns="head", mass=0.6)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", LARGE + code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.full
def test_sheet_of_72_panels_of_a_large_photo_needs_little_memory() -> None:
    """Check the memory: at the photo's own size the values alone would take 3.4 GB."""
    grown = run(
        """
photo = Image.new("RGB", (4000, 3000), (9, 9, 9))
before = peak()
page(4000, 3000, 6, 12)
print(peak() - before)
"""
    )
    assert int(grown) < 500


def test_sheet_of_a_narrow_photo_is_refused_or_of_limited_size() -> None:
    """Check a very narrow photo: 1 x 60000 pixels, scaled to the panel's width, would be 224 x 13 million."""
    outcome = run(
        """
photo = Image.new("RGB", (1, 60_000), (9, 9, 9))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, -1))
try:
    picture = page(1, 60_000, 2, 2)
    print("page")
except VisattnError:
    print("refused")
"""
    )
    assert outcome in ("page", "refused")


# ---- the matrix -------------------------------------------------------------------------------------------------------------------


def matrix(side: int) -> NDArray[np.float32]:
    values = np.random.default_rng(2).random((side, side), dtype=np.float32)
    rows: NDArray[np.float32] = values / values.sum(axis=1, keepdims=True)
    return rows


def test_small_matrix_is_enlarged_by_integer_factors(written: Written) -> None:
    page = matrix_page(np.eye(4, dtype=np.float32) + matrix(4), ("cls",), side=101, title="a head")
    assert "both cls, then patches in raster order" in " ".join(written.texts)
    cells = np.asarray(page)
    hottest = table("viridis")[255]
    assert (cells == hottest).all(axis=2).sum() >= 25 * 25


def test_large_matrix_is_averaged_over_blocks(written: Written) -> None:
    """Check a 6 x 6 matrix drawn on 3 x 3 pixels, with 2 x 2 weights per pixel."""
    weights = np.zeros((6, 6), np.float32)
    weights[0, 1] = 1.0  # a quarter of the first block
    weights[4:, 4:] = 1.0  # the whole last block
    page = np.asarray(matrix_page(weights, (), side=3))
    assert "each pixel is the mean of 2 x 2 weights" in " ".join(written.texts)
    levels = {tuple(color): level for level, color in enumerate(table("viridis").tolist())}
    found = [levels.get(tuple(pixel), -1) for pixel in page[18 : 18 + 3, 18 : 18 + 3].reshape(-1, 3).tolist()]
    assert found[0] == pytest.approx(64, abs=3)
    assert found[8] == 255
    assert found[4] == 0


def test_matrix_of_another_shape_than_square_is_drawn() -> None:
    assert matrix_page(matrix(40)[:1], ("query0",), side=80).width >= 80


def test_uniform_matrix_is_drawn() -> None:
    assert matrix_page(np.full((5, 5), 0.2, np.float32), (), side=50).height >= 50


def test_diagonal_of_a_large_matrix_is_visible() -> None:
    """Check a matrix with one nonzero weight in 300, fewer than the clipped share of peaks."""
    page = np.asarray(matrix_page(np.eye(300, dtype=np.float32), (), side=300))
    assert (page[18 : 18 + 300, 18 : 18 + 300] != page[19, 18]).any()


def test_photos_are_made_smaller_by_means_and_larger_by_curves() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    found = random_map(axes=())
    for width, resampling in ((40, Image.Resampling.BOX), (160, Image.Resampling.BICUBIC)):
        place = Geometry((60, 80), (32, 48), Box(0, 0, 60, 80))
        panels = Panels(Image.fromarray(pixels), found, place, panel=width, shared_axes=(), style=Style())
        assert panels.photo == Image.fromarray(pixels).resize((width, width * 3 // 4), resampling)


def test_pictures_of_a_row_are_320_pixels_wide() -> None:
    picture = Image.new("RGB", (64, 48), GREEN)
    colors = np.asarray(side_by_side([picture, picture])) == GREEN
    assert colors.all(-1).any(0).sum() == 2 * 320
    assert colors.all(-1).any(1).sum() == 240
