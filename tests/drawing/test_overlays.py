"""Overlays pixel by pixel: end points of the color scale, values in between, unchanged pixels, and colors only."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from PIL import Image

from tests.drawing.overlaying import GRID, HEIGHT, WIDTH, How, Values, heat_values, heatmap, noise
from visattn._support.types import Colormap
from visattn.core.drawing.colormaps import table
from visattn.core.drawing.overlays import colorize, overlay, rgb_components
from visattn.core.drawing.pictures import to_png
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, Heatmap, normalize
from visattn.core.provenance import Provenance, Sink
from visattn.core.records import TokenLayout
from visattn.errors import ShapeError

Pixels = NDArray[np.uint8]


CROPPED = Geometry((HEIGHT, WIDTH), (32, 48), Box(4, 6, 20, 30))


def assert_colors(picture: Pixels, values: Values, low: float, high: float, name: str) -> None:
    """Check that every pixel has the table's color of its value; ties may round to either side."""
    colors = [tuple(row) for row in table(name).tolist()]
    for index in np.ndindex(*values.shape):
        exact = min(max(255 * (float(values[index]) - low) / (high - low), 0), 255)
        allowed = {colors[level] for level in range(256) if abs(level - exact) <= 0.502}
        assert tuple(picture[index].tolist()) in allowed, (index, exact)


def mixed(photo: Pixels, color: Pixels, share: Values) -> Values:
    """Blend photo and color pixel by pixel and channel by channel."""
    result = np.zeros(photo.shape)
    for y, x, c in np.ndindex(*photo.shape):
        result[y, x, c] = share[y, x] * float(color[y, x, c]) + (1 - share[y, x]) * float(photo[y, x, c])
    return result


@pytest.mark.parametrize("blend", ["constant", "value"])
@pytest.mark.parametrize("how", ["auto", "minmax", "none", "percentile", "symmetric"])
def test_opacity_0_gives_the_bytes_of_the_photo(blend: Literal["constant", "value"], how: How) -> None:
    photo = noise()
    assert overlay(photo, heat_values(), opacity=0, blend=blend, normalize=how).tobytes() == photo.tobytes()


@pytest.mark.parametrize("name", ["inferno", "viridis", "gray", "jet"])
def test_opacity_1_gives_the_colors_of_the_map(name: Colormap) -> None:
    values = heat_values()
    got = np.asarray(overlay(noise(), values, opacity=1, colormap=name))
    assert_colors(got, values.astype(np.float32).astype(float), float(values.min()), float(values.max()), name)


@pytest.mark.parametrize(
    ("how", "low", "high", "name"),
    [
        ("none", 0.0, 1.0, "inferno"),
        ("symmetric", -0.9, 0.9, "blue-white-red"),
        ("minmax", 0.1, 0.9, "inferno"),
        ("percentile", 0.108, 0.892, "inferno"),  # percentiles of equal steps from 0.1 to 0.9
    ],
)
def test_opacity_1_follows_the_normalization(how: How, low: float, high: float, name: str) -> None:
    values = np.linspace(0.1, 0.9, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)
    assert_colors(np.asarray(overlay(noise(), values, opacity=1, normalize=how)), values, low, high, name)


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(st.lists(st.floats(-1000, 1000, width=32), min_size=12, max_size=12).filter(lambda v: max(v) - min(v) > 0.1))
def test_opacity_1_gives_the_colors_of_any_map(flat: list[float]) -> None:
    values = np.array(flat).reshape(3, 4)
    got = np.asarray(overlay(noise(3, 4), values, opacity=1))
    assert_colors(got, values, min(flat), max(flat), "inferno")


@pytest.mark.parametrize("opacity", [0.1, 0.25, 0.5, 0.7, 0.99])
def test_blending_is_linear_in_the_opacity(opacity: float) -> None:
    photo, values = noise(), heat_values()
    color = np.asarray(overlay(photo, values, opacity=1))
    got = np.asarray(overlay(photo, values, opacity=opacity, blend="constant")).astype(float)
    expected = mixed(np.asarray(photo), color, np.full(values.shape, opacity))
    assert np.abs(got - expected).max() <= 1


@pytest.mark.parametrize("opacity", [0.3, 0.8, 1.0])
def test_value_blend_has_an_opacity_proportional_to_the_value(opacity: float) -> None:
    photo, values = noise(), heat_values()
    color = np.asarray(overlay(photo, values, opacity=1))
    share = opacity * (values - values.min()) / (values.max() - values.min())
    gray = photo.convert("L").convert("RGB")
    grounds: dict[Literal["auto", "photo", "gray"], Image.Image] = {"photo": photo, "gray": gray, "auto": gray}
    for ground, below in grounds.items():
        got = np.asarray(overlay(photo, values, opacity=opacity, blend="value", ground=ground)).astype(float)
        assert np.abs(got - mixed(np.asarray(below), color, share)).max() <= 1.5  # the opacity per pixel has 256 levels


def test_value_blend_of_signed_values_shows_the_gray_photo_at_zero() -> None:
    heat = heatmap(GRID, meaning="cosine similarity", signed=True)
    signed = np.asarray(overlay(noise(), heat, opacity=1, blend="value")).astype(float)
    color = np.asarray(overlay(noise(), heat, opacity=1))
    share = np.abs(heat.values.astype(float)) / np.abs(heat.grid).max()
    gray = np.asarray(noise().convert("L").convert("RGB"))
    assert np.abs(signed - mixed(gray, color, share)).max() <= 2


@pytest.mark.parametrize("opacity", [0.0, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("signed", [False, True])
def test_default_blend_is_by_value_and_constant_at_opacity_1(opacity: float, signed: bool) -> None:
    heat = heatmap(GRID, signed=signed)
    named: Literal["constant", "value"] = "constant" if opacity == 1 else "value"
    got, expected = overlay(noise(), heat, opacity=opacity), overlay(noise(), heat, opacity=opacity, blend=named)
    assert got.tobytes() == expected.tobytes()
    assert got.provenance is not None
    if opacity:
        assert got.provenance.drawing["blend"] == named


def test_scale_of_a_heatmap_is_that_of_its_grid() -> None:
    """Check the color scale: it comes from the grid, as interpolation flattens peaks in the pixels."""
    grid = np.zeros((6, 9))
    grid[2, 4] = 1
    place = Geometry((7, 11), (96, 144), Box(0, 0, 7, 11))
    heat = heatmap(grid, place)
    assert heat.values.max() < 0.9
    assert_colors(np.asarray(overlay(noise(7, 11), heat, opacity=1)), heat.values.astype(float), 0, 1, "inferno")


@pytest.mark.parametrize(("signed", "name"), [(False, "inferno"), (True, "blue-white-red")])
def test_the_sign_decides_the_colors(signed: bool, name: str) -> None:
    heat = heatmap(GRID, signed=signed)
    low = -5.0 if name == "blue-white-red" else 0.0
    assert_colors(np.asarray(overlay(noise(), heat, opacity=1)), heat.values.astype(float), low, 5.0, name)


@pytest.mark.parametrize("signed", [False, True])
def test_normalized_heatmap_has_the_picture_of_the_raw_one(signed: bool) -> None:
    heat = heatmap(GRID, signed=signed)
    raw = np.asarray(overlay(noise(), heat, opacity=1)).astype(int)
    assert (
        np.abs(np.asarray(overlay(noise(), normalize(heat), opacity=1)).astype(int) - raw).max() <= 6
    )  # ties may differ by one level


def test_shared_scale_is_kept_when_a_panel_is_drawn() -> None:
    """Check that a weak panel next to a strong one stays dark."""
    heat = normalize(heatmap([[[0.0, 0.1]], [[0.0, 1.0]]], axes=("head",)), shared_axes=("head",))
    weak = np.asarray(overlay(noise(), heat.at(head=0), opacity=1))
    assert_colors(weak, heat.values[0].astype(float), 0, 1, "inferno")


@pytest.mark.parametrize("blend", ["constant", "value"])
@pytest.mark.parametrize("opacity", [0.5, 1.0])
def test_the_ground_has_no_color_outside_the_models_crop(blend: Literal["constant", "value"], opacity: float) -> None:
    photo, heat = noise(), heatmap(GRID, CROPPED)
    got = np.asarray(overlay(photo, heat, opacity=opacity, blend=blend))
    before = np.asarray(photo if blend == "constant" else photo.convert("L").convert("RGB"))
    unseen = np.ones((HEIGHT, WIDTH), bool)
    unseen[4:20, 6:30] = False
    assert np.array_equal(got[unseen], before[unseen])
    assert (got[~unseen] != before[~unseen]).any(axis=1).mean() > 0.9


def test_pixels_beyond_the_last_patch_are_unchanged() -> None:
    """Check 230 pixels with 14 patches of 16 pixels: the last 6 pixels are not part of any patch."""
    photo = noise(230, 230)
    tensor = torch.rand(14, 14, generator=torch.Generator().manual_seed(0))
    layout = TokenLayout("tokens", (), (14, 14), Box(0, 0, 224, 224))
    heat = AttentionMap(tensor, (), layout, {}, "attention").to_heatmap(Geometry((230, 230), (230, 230), Box(0, 0, 230, 230)))
    changed = (np.asarray(overlay(photo, heat, ground="photo")) != np.asarray(photo)).any(axis=2)
    assert changed[:224, :224].mean() > 0.98
    assert not changed[224:].any()
    assert not changed[:, 224:].any()


NOTHING_SEEN = """
import torch
from PIL import Image
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap
from visattn.core.records import TokenLayout
from visattn.core.drawing import overlay
layout = TokenLayout("tokens", (), (2, 3), Box(0, 0, 32, 48))
place = Geometry((1, 1000), (32, 48), Box(0.05, 499.6, 0.95, 500.4))
heat = AttentionMap(torch.rand(2, 3), (), layout, {}, "attention").to_heatmap(place)
photo = Image.new("RGB", (1000, 1), (9, 8, 7))
print(overlay(photo, heat).tobytes() == photo.tobytes(), overlay(photo, heat, blend="value").tobytes() == photo.tobytes())
"""


@pytest.mark.full
def test_photo_with_an_empty_seen_box_is_returned_unchanged() -> None:
    """Run in a separate process: OpenCV divides by the size of an empty array, which would kill it."""
    done = subprocess.run([sys.executable, "-c", NOTHING_SEEN], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True True"), done.stderr


@pytest.mark.parametrize("opacity", [0.0, 0.5, 1.0])
def test_arguments_are_not_modified(opacity: float) -> None:
    photo, heat = noise(), heatmap(GRID, CROPPED, sinks=(Sink(0, 1, 9.0, "a"),))
    before = photo.tobytes(), heat.values.copy(), heat.grid.copy()
    picture = overlay(photo, heat, opacity=opacity, blend="value", contours=(0.5,))
    picture.paste((1, 2, 3), (0, 0, WIDTH, HEIGHT))
    assert photo.tobytes() == before[0]
    assert np.array_equal(heat.values, before[1])
    assert np.array_equal(heat.grid, before[2])


@pytest.mark.parametrize("opacity", [0.2, 0.5, 0.8])
def test_brightness_of_the_photo_is_never_rescaled(opacity: float) -> None:
    """Check that a photo with half the brightness halves the photo's part of the picture, so that videos do not flicker."""
    bright = np.asarray(noise()) // 2 * 2
    values = heat_values()
    first = np.asarray(overlay(bright, values, opacity=opacity, blend="constant")).astype(float)
    second = np.asarray(overlay(bright // 2, values, opacity=opacity, blend="constant")).astype(float)
    assert np.abs(first - second - (1 - opacity) * bright / 2).max() <= 1


def test_colorize_is_the_colormap_and_black_outside_the_crop() -> None:
    heat = heatmap(GRID, CROPPED)
    got = np.asarray(colorize(heat, colormap="viridis"))
    assert_colors(got[4:20, 6:30], heat.values[4:20, 6:30].astype(float), 0, 5, "viridis")
    unseen = np.ones((HEIGHT, WIDTH), bool)
    unseen[4:20, 6:30] = False
    assert not got[unseen].any()


def component_heat(geometry: Geometry | None = None) -> Heatmap:
    grids = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(2)) - 0.5
    place = geometry or Geometry((HEIGHT, WIDTH), (64, 96), Box(0, 0, HEIGHT, WIDTH))
    return heatmap(grids, place, axes=("component",), meaning="principal component")


def test_components_become_red_green_and_blue() -> None:
    heat = component_heat()
    got = np.asarray(rgb_components(noise(), heat, ranges=[(-0.5, 0.5), (-0.2, 0.3), (0.0, 0.1)]))
    expected = np.zeros((HEIGHT, WIDTH, 3))
    for c, (low, high) in enumerate([(-0.5, 0.5), (-0.2, 0.3), (0.0, 0.1)]):
        for y, x in np.ndindex(HEIGHT, WIDTH):
            expected[y, x, c] = min(max((float(heat.values[c, y, x]) - low) / (high - low), 0), 1) * 255
    assert np.abs(got - expected).max() <= 0.501


def test_components_are_scaled_by_percentiles_of_their_grids() -> None:
    heat = component_heat()
    ranges = []
    for grid in heat.grid:
        ordered = sorted(grid.ravel().tolist())
        place = 0.01 * (len(ordered) - 1)
        low = ordered[0] + place * (ordered[1] - ordered[0])
        ranges.append((low, ordered[-1] - place * (ordered[-1] - ordered[-2])))
    given_ranges = np.asarray(rgb_components(noise(), heat, ranges)).astype(int)
    assert np.abs(np.asarray(rgb_components(noise(), heat)).astype(int) - given_ranges).max() <= 1


def test_components_show_the_photo_outside_the_models_crop() -> None:
    heat = component_heat(Geometry((HEIGHT, WIDTH), (64, 96), Box(4, 6, 20, 30)))
    got, before = np.asarray(rgb_components(noise(), heat)), np.asarray(noise())
    unseen = np.ones((HEIGHT, WIDTH), bool)
    unseen[4:20, 6:30] = False
    assert np.array_equal(got[unseen], before[unseen])
    assert (got[~unseen] != before[~unseen]).any(axis=1).mean() > 0.9


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3])
def test_constant_component_is_one_color_not_noise(value: float) -> None:
    """Check that rounding errors of interpolation are not stretched to black and white."""
    heat = heatmap(np.full((3, 4, 6), value), axes=("component",), meaning="principal component")
    assert len(np.unique(np.asarray(rgb_components(noise(), heat)))) == 1


@pytest.mark.parametrize(
    "heat", [heatmap([GRID, GRID], axes=("component",)), heatmap([GRID] * 3, axes=("head",))], ids=["two", "heads"]
)
def test_heatmap_without_three_components_is_refused(heat: Heatmap) -> None:
    with pytest.raises(ShapeError, match=r"components must be \(3, 24, 36\), got"):
        rgb_components(noise(), heat)


def test_png_holds_the_picture_and_its_provenance() -> None:
    provenance = Provenance(
        model="vit</script>",
        image='🦆 "x"\n.png',
        geometry=CROPPED,
        method="rollout",
        parameters={"fusion": "mean", "discard": 0.9},
        value_range=(0.001, 0.25),
        sinks=((Sink(0, 2, 12.5, "blocks.0"),),),
        notes=("a", "b"),
    )
    picture = noise()
    back = Image.open(io.BytesIO(to_png(picture, provenance)), formats=["PNG"])
    back.load()
    assert back.tobytes() == picture.tobytes()
    assert Provenance.from_dict(json.loads(back.info["visattn"])) == provenance


def test_png_of_the_same_picture_has_the_same_bytes() -> None:
    assert to_png(noise(), Provenance(model="a")) == to_png(noise(), Provenance(model="a"))


def test_contours_and_opacity_accept_scalars_of_other_types() -> None:
    photo, heat = np.zeros((32, 48, 3), np.uint8), np.random.default_rng(0).random((32, 48), np.float32)
    assert overlay(photo, heat, contours=0.5).tobytes() == overlay(photo, heat, contours=[0.5]).tobytes()
    for levels in (np.float32(0.5), np.array(0.5), np.array([0.5], np.float32)):
        assert overlay(photo, heat, contours=levels).tobytes() == overlay(photo, heat, contours=0.5).tobytes()  # type: ignore[arg-type]
    assert overlay(photo, heat, opacity=True).tobytes() == overlay(photo, heat, opacity=1).tobytes()
