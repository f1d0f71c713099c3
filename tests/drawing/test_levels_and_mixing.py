"""Levels, mixing, hatching and memory of overlays, color tables, layers and styles, with values worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.drawing.overlaying import GRID, heatmap, noise
from visattn.core.drawing import overlays
from visattn.core.drawing.colormaps import table
from visattn.core.drawing.layers import layer_between
from visattn.core.drawing.overlays import colorize, on_scale, overlay, rgb_components
from visattn.core.drawing.pictures import Picture, encoded, to_png
from visattn.core.drawing.style import Style
from visattn.core.drawing.style_options import PAGE
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import Heatmap
from visattn.core.provenance import Provenance
from visattn.errors import OptionError, ShapeError, VisattnWarning

# ---- hatching ---------------------------------------------------------------------------------------------------------------------


def test_holes_are_darkened_with_a_line_in_every_sixth_diagonal() -> None:
    holes = np.zeros((12, 15), bool)
    holes[2:10, 3:14] = True
    photo = np.full((12, 15, 4), 90, np.uint8)
    made = np.zeros((12, 15, 4), np.uint8)
    made[holes] = overlays._hatch(photo, holes)
    assert {(x + y) % 6 for y, x in np.argwhere(made[..., 0] == 190)} == {0}
    assert {(x + y) % 6 for y, x in np.argwhere(made[..., 0] == 30)} == {1, 2, 3, 4, 5}
    assert not made[~holes].any()


@pytest.mark.parametrize(("side", "step", "lines"), [(419, 6, 1), (420, 7, 1), (600, 10, 2), (1000, 16, 3)])
def test_hatch_lines_grow_with_the_picture(side: int, step: int, lines: int) -> None:
    holes = np.zeros((9, side), bool)
    holes[0] = True
    found = overlays._hatch(np.full((9, side, 3), 90, np.uint8), holes)[:, 0]
    assert (found[: 2 * step] == 190).tolist() == ([True] * lines + [False] * (step - lines)) * 2


# ---- levels and memory ------------------------------------------------------------------------------------------------------------


def test_levels_are_rounded_and_clipped() -> None:
    values = np.array([[-5, 0, 1, 2, 40]], np.float32)
    assert overlays._levels(values, 10, 3, below=True).tolist() == [[0, 3, 13, 23, 255]]
    assert overlays._levels(values[:, 1:], 10, 3, below=False).tolist() == [[3, 13, 23, 255]]


def test_scratch_memory_is_used_again_unless_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlays, "_KEPT", 60)
    first = overlays._scratch("of_a_test", (3, 5, 4))
    assert first.shape == (3, 5, 4)
    assert str(first.dtype) == "uint8"
    assert np.shares_memory(first, overlays._scratch("of_a_test", (3, 5, 4)))
    assert np.shares_memory(first, overlays._scratch("of_a_test", (2, 3)))
    assert not np.shares_memory(first, overlays._scratch("of_another_test", (2, 3)))
    large = overlays._scratch("of_a_test", (61,))
    assert not np.shares_memory(first, large)
    assert not np.shares_memory(large, overlays._scratch("of_a_test", (61,)))


def test_a_thread_keeps_up_to_64_mebibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlays, "_memory", SimpleNamespace())
    kept, large = (4096, 4096, 4), (4096 * 4096 * 4 + 1,)
    assert np.shares_memory(overlays._scratch("a", kept), overlays._scratch("a", kept))
    assert not np.shares_memory(overlays._scratch("a", large), overlays._scratch("a", large))


def test_pictures_of_many_rows_are_mixed_in_parts() -> None:
    heat = np.linspace(0, 1, 1000, dtype=np.float32)[:, None].repeat(3, 1)
    drawn = np.asarray(overlay(noise(1000, 3), heat, opacity=1))
    assert (drawn == table("inferno")[(heat * 255).round().astype(int)]).all()


# ---- mixing -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_value", "signed", "expected"),
    [
        (False, False, {0: (150, 30, 15), 51: (170.4, 50.4, 35.4), 255: (252, 132, 117)}),
        (True, False, {0: (250, 50, 25), 51: (234, 50, 27), 255: (252, 132, 117)}),
        (True, True, {255: (252, 132, 117), 0: (150, 30, 15), 128: (250, 50, 25)}),
    ],
)
def test_colors_and_photo_are_mixed_by_their_shares(by_value: bool, signed: bool, expected: dict[int, tuple[float, ...]]) -> None:
    """Colors are gray and opaque to 0.4, or as much times the value; times its magnitude for signed values."""
    pixels = np.zeros((2, 3, 4), np.uint8)
    pixels[..., :3] = (250, 50, 25)
    mix = overlays._Mix("gray", 0.4, by_value, signed)
    for level, color in expected.items():
        out = np.zeros_like(pixels)
        mix(pixels, np.full((2, 3), level, np.uint8), out)
        assert np.abs(out[..., :3].astype(float) - color).max() <= 1.1


def test_the_sum_of_colors_at_full_opacity_is_the_table() -> None:
    out = np.zeros((1, 256, 4), np.uint8)
    overlays._Mix("viridis", 1.0, False, False)(out.copy(), np.arange(256, dtype=np.uint8)[None], out)
    assert (out[0, :, :3] == table("viridis")).all()


# ---- overlays ---------------------------------------------------------------------------------------------------------------------


def test_a_span_below_the_smallest_is_constant_and_one_above_is_drawn() -> None:
    photo = noise(2, 3)
    small, large = (np.array([[0, 0, 0], [0, 0, span]], np.float32) for span in (5e-36, 2e-35))
    with pytest.warns(VisattnWarning, match="the map is constant"):
        assert overlay(photo, small).tobytes() == photo.tobytes()
    assert np.asarray(colorize(large))[1, 2].tolist() == table("inferno")[255].tolist()
    assert np.asarray(colorize(large))[0, 0].tolist() == table("inferno")[0].tolist()


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.5, 0.5, "the map is constant (0.5); the photo is unchanged."),
        (0, 9e-36, "the map is constant (0); the photo is unchanged."),
        (0, 1e-35, "the map is nearly even (0 to 1e-35); the photo is unchanged."),
        (0.505, 0.507, "the map is nearly even (0.505 to 0.507); the photo is unchanged."),
    ],
)
def test_a_map_that_is_not_drawn_is_constant_or_nearly_even(low: float, high: float, said: str) -> None:
    assert overlays._uncolored(low, high).startswith(said)


@pytest.mark.parametrize("seen", [Box(5, 6, 5, 20), Box(5, 6, 20, 6)])
def test_a_map_of_no_pixel_leaves_the_photo_with_a_warning(seen: Box) -> None:
    photo = noise()
    with pytest.warns(VisattnWarning, match="contains no pixel of the photo"):
        assert overlay(photo, replace(heatmap(GRID), seen=seen)).tobytes() == photo.tobytes()


@pytest.mark.parametrize("seen", [Box(5, 6, 6, 20), Box(5, 6, 20, 7)])
def test_a_map_of_one_line_of_pixels_is_drawn(seen: Box) -> None:
    photo = noise()
    drawn = np.asarray(overlay(photo, replace(heatmap(GRID), seen=seen), opacity=1))
    rows, columns = np.nonzero((drawn != np.asarray(photo)).any(-1))
    assert (rows.min(), columns.min(), rows.max() + 1, columns.max() + 1) == seen


def test_colors_of_a_picture_on_a_scale_are_those_of_its_values() -> None:
    black = Image.new("RGB", (36, 24))
    drawn = np.asarray(on_scale(black, heatmap(GRID), -5, 10, Style(opacity=1)))
    assert drawn[0, 0].tolist() == table("inferno")[85].tolist()
    assert drawn[-1, 0].tolist() == table("inferno")[170].tolist()
    even = on_scale(black, heatmap(GRID), 3, 3, Style(opacity=1))
    assert not np.asarray(even).any()


def test_only_the_color_of_the_inside_of_a_map_is_drawn() -> None:
    heat = heatmap(GRID, Geometry((24, 36), (32, 48), Box(3, 5, 20, 31)))
    drawn = np.asarray(np.asarray(colorize(heat)).any(-1))
    expected = np.zeros((24, 36), bool)
    expected[3:20, 5:31] = True
    assert not drawn[~expected].any()
    assert colorize(np.arange(6, dtype=np.float32).reshape(2, 3)).size == (3, 2)


@pytest.mark.parametrize(("opacity", "rings"), [(0, False), (0.001, True), (0.999, True), (1, False)])
def test_rings_need_photo_and_colors(opacity: float, rings: bool) -> None:
    assert Style(opacity=opacity).rings is rings
    assert not Style(opacity=opacity, marks=False).rings


def components(values: Any, **changes: Any) -> Heatmap:
    return replace(heatmap(np.asarray(values, np.float32), axes=("component",)), **changes)


def test_components_are_red_green_and_blue_on_their_own_scales() -> None:
    values = np.zeros((3, 2, 3), np.float32)
    values[0, 0, 0], values[1, 0, 2], values[2, 1, 0] = 1, 1, 1
    ranges = [(0.0, 1.0), (0.0, 0.5), (-1.0, 1.0)]
    heat = components(values)
    drawn = np.asarray(rgb_components(noise(), heat, ranges)).astype(int)
    for channel, (low, high) in enumerate(ranges):
        expected = ((heat.values[channel] - low) / (high - low)).clip(0, 1) * 255
        assert np.abs(drawn[..., channel] - expected).max() <= 0.51
    flat = np.asarray(rgb_components(noise(), heat, [(0.0, 1.0), (0.5, 0.5), (2.0, 1.0)]))
    assert not flat[..., 1:].any()
    assert flat[0, 0].tolist() == [255, 0, 0]


def test_components_leave_the_photo_outside_what_was_seen() -> None:
    heat = components(np.random.default_rng(0).random((3, 2, 3)))
    part = replace(heat, seen=Box(3, 5, 20, 31))
    drawn, photo = np.asarray(rgb_components(noise(), part)), np.asarray(noise())
    whole = np.asarray(rgb_components(noise(), heat))
    inside = np.zeros((24, 36), bool)
    inside[3:20, 5:31] = True
    assert (drawn[~inside] == photo[~inside]).all()
    assert (drawn[inside] == whole[inside]).all()


def test_components_of_other_axes_or_sizes_are_refused() -> None:
    heat = components(np.zeros((3, 2, 3)))
    for wrong in (replace(heat, axes=("head",)), replace(heat, values=heat.values[:2])):
        with pytest.raises(ShapeError, match=r"components must be \(3, 24, 36\), got"):
            rgb_components(noise(), wrong)


# ---- color tables -----------------------------------------------------------------------------------------------------------------


def test_the_diverging_table_passes_through_its_five_colors() -> None:
    colors = table("blue-white-red").tolist()
    assert (colors[0], colors[255]) == ([5, 48, 97], [103, 0, 31])
    assert (colors[51], colors[204]) == ([55, 127, 175], [192, 77, 68])
    assert (colors[127], colors[128]) == ([246, 246, 247], [247, 246, 246])


def test_tables_of_opencv_are_rgb_and_cannot_be_written() -> None:
    assert table("inferno").shape == (256, 3)
    assert table("jet")[255].tolist() == [128, 0, 0]
    assert table("jet")[0].tolist() == [0, 0, 128]
    assert table("gray")[7].tolist() == [7, 7, 7]
    assert not any(table(name).flags.writeable for name in ("gray", "jet", "blue-white-red"))


# ---- layers -----------------------------------------------------------------------------------------------------------------------


def pixel(*color: int) -> Image.Image:
    return Image.new("RGB", (1, 1), color)


@pytest.mark.parametrize(
    ("black", "white", "colors", "opacity", "rgba"),
    [
        ((0, 0, 0), (255, 255, 255), (9, 9, 9), None, [0, 0, 0, 0]),
        ((80, 40, 20), (80, 40, 20), (80, 40, 20), None, [80, 40, 20, 255]),
        ((50, 25, 10), (205, 180, 165), (128, 64, 26), None, [128, 64, 26, 100]),
        ((50, 25, 10), (205, 180, 165), (128, 64, 200), None, [128, 64, 26, 100]),
        ((50, 25, 10), (205, 180, 170), (128, 64, 26), None, [134, 67, 27, 95]),
        ((40, 20, 10), (193, 173, 163), (100, 50, 25), 0.4, [100, 50, 25, 102]),
        ((40, 20, 10), (194, 174, 164), (100, 50, 25), 0.4, [100, 50, 25, 102]),
        ((40, 20, 10), (192, 172, 162), (100, 50, 25), 0.4, [100, 50, 25, 102]),
        ((40, 20, 10), (195, 175, 165), (100, 50, 25), 0.4, [100, 50, 25, 100]),
        ((40, 20, 10), (191, 171, 161), (100, 50, 25), 0.4, [100, 50, 25, 104]),
    ],
)
def test_a_layer_holds_what_was_drawn(black: Any, white: Any, colors: Any, opacity: float | None, rgba: list[int]) -> None:
    layer = layer_between(pixel(*black), pixel(*white), pixel(*colors), opacity)
    assert layer.mode == "RGBA"
    assert list(np.asarray(layer)[0, 0]) == rgba


# ---- styles and pictures ----------------------------------------------------------------------------------------------------------


def test_a_style_has_documented_defaults() -> None:
    style = Style()
    assert (style.normalize, style.opacity, style.blend, style.ground, style.colormap) == ("auto", 0.8, "auto", "auto", None)
    assert (style.lines, style.marks, style.transparent, style.interpolation) == ([], True, False, "bilinear")
    assert PAGE == {"opacity": 0.6, "blend": "constant", "interpolation": "nearest"}


@pytest.mark.parametrize(
    ("blend", "opacity", "by_value"),
    [("auto", 0.5, True), ("auto", 1, False), ("value", 1, True), ("constant", 0.5, False), ("value", 0.5, True)],
)
def test_low_values_are_more_transparent_by_value_and_by_default_below_full_opacity(
    blend: Any, opacity: float, by_value: bool
) -> None:
    assert Style(blend=blend, opacity=opacity).by_value is by_value
    assert Style(blend=blend, opacity=opacity).facts(False)["blend"] == ("value" if by_value else "constant")


@pytest.mark.parametrize(
    ("options", "is_gray"),
    [
        ({}, True),
        ({"blend": "value", "opacity": 1}, True),
        ({"blend": "constant"}, False),
        ({"opacity": 1}, False),
        ({"opacity": 0}, False),
        ({"opacity": 0, "ground": "gray"}, False),
        ({"ground": "photo"}, False),
        ({"ground": "gray", "blend": "constant"}, True),
    ],
)
def test_colors_lie_on_gray_where_they_are_blended_by_value(options: Any, is_gray: bool) -> None:
    style = Style(**options)
    assert style.is_gray is is_gray
    assert style.facts(False)["ground"] == ("gray" if is_gray else "photo")


@pytest.mark.parametrize(
    ("normalize", "colormap", "signed", "name"),
    [
        ("auto", None, False, "inferno"),
        ("auto", None, True, "blue-white-red"),
        ("symmetric", None, False, "blue-white-red"),
        ("minmax", None, True, "blue-white-red"),
        ("symmetric", "jet", True, "jet"),
    ],
)
def test_signed_values_have_a_diverging_color_map(normalize: Any, colormap: str | None, signed: bool, name: str) -> None:
    assert Style(normalize=normalize, colormap=colormap).colors(signed) == name


@pytest.mark.parametrize("options", [{"opacity": 1.01}, {"opacity": -0.01}, {"contours": 1.01}, {"contours": (0.5, -0.01)}])
def test_shares_beyond_0_and_1_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="must be a number from 0 to 1"):
        Style(**options)


def test_shares_of_0_and_1_are_taken() -> None:
    assert [Style(opacity=share).opacity for share in (0, 1)] == [0, 1]
    assert Style(contours=(0, 0.25, 1)).lines == [0, 0.25, 1]
    assert Style(contours=0.5).lines == [0.5]


def test_pictures_are_encoded_with_fixed_quality(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def save(self: Image.Image, fp: Any, kind: str, **options: Any) -> None:
        found.append((kind, options))

    monkeypatch.setattr(Image.Image, "save", save)
    for kind in ("PNG", "JPEG", "WEBP"):
        encoded(noise(), kind)
    assert found == [("PNG", {"compress_level": 3}), ("JPEG", {"quality": 95, "subsampling": 0}), ("WEBP", {"quality": 90})]


def test_png_files_store_the_given_provenance_alone() -> None:
    assert b"visattn" in to_png(noise(), Provenance(model="vit"))
    assert b"visattn" not in to_png(noise())
    made = overlay(noise(), heatmap(GRID))
    assert isinstance(made, Picture)
    assert b"visattn" in to_png(made)
