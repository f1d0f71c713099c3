from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from PIL import Image

from visattn.drawing.colormaps import table
from visattn.drawing.marks import outline, ring, spotlight
from visattn.drawing.overlays import colorize, overlay, rgb_components
from visattn.drawing.pictures import to_png
from visattn.errors import ImageError, MapError, OptionError, ShapeError, VisattnWarning
from visattn.geometry import Box, Geometry
from visattn.maps import AttentionMap, Heatmap, MapFacts, normalize
from visattn.provenance import Provenance, Sink
from visattn.records import TokenLayout

Pixels = NDArray[np.uint8]
Values = NDArray[np.float64]
How = Literal["auto", "minmax", "none", "percentile", "symmetric"]
HEIGHT, WIDTH = 24, 36


def noise(height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    return Image.fromarray(np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8))


def heat_values(height: int = HEIGHT, width: int = WIDTH) -> Values:
    return np.random.default_rng(4).random((height, width))


def heatmap(
    grid: Sequence[Any] | NDArray[Any] | torch.Tensor,
    geometry: Geometry | None = None,
    axes: tuple[str, ...] = (),
    meaning: str = "attention",
    sinks: tuple[Sink, ...] = (),
    *,
    signed: bool = False,
) -> Heatmap:
    """A heatmap of the noise photo, from a grid whose patches have 16 input pixels."""
    tensor = torch.as_tensor(grid, dtype=torch.float32)
    rows, columns = tensor.shape[-2:]
    layout = TokenLayout("tokens", (), (rows, columns), Box(0, 0, 16 * rows, 16 * columns))
    place = geometry or Geometry((HEIGHT, WIDTH), (16 * rows, 16 * columns), Box(0, 0, HEIGHT, WIDTH))
    facts = MapFacts(sinks=(sinks,) if sinks else ())
    return AttentionMap(tensor, axes, layout, {}, meaning, Provenance(versions={}), signed, facts).to_heatmap(place)


GRID = [[0.0, 1.0, 2.0], [5.0, 3.0, 4.0]]
CROPPED = Geometry((HEIGHT, WIDTH), (32, 48), Box(4, 6, 20, 30))


def assert_colours(picture: Pixels, values: Values, low: float, high: float, name: str) -> None:
    """Every pixel is the colour of its own value, found one by one in the table; a tie may round to either side."""
    colours = [tuple(row) for row in table(name).tolist()]
    for index in np.ndindex(*values.shape):
        exact = min(max(255 * (float(values[index]) - low) / (high - low), 0), 255)
        allowed = {colours[level] for level in range(256) if abs(level - exact) <= 0.502}
        assert tuple(picture[index].tolist()) in allowed, (index, exact)


def mixed(photo: Pixels, colour: Pixels, share: Values) -> Values:
    """The mixture pixel by pixel and channel by channel."""
    result = np.zeros(photo.shape)
    for y, x, c in np.ndindex(*photo.shape):
        result[y, x, c] = share[y, x] * float(colour[y, x, c]) + (1 - share[y, x]) * float(photo[y, x, c])
    return result


# ---- end points and what lies between ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blend", ["constant", "value"])
@pytest.mark.parametrize("how", ["auto", "minmax", "none", "percentile", "symmetric"])
def test_opacity_0_gives_the_bytes_of_the_photo(blend: Literal["constant", "value"], how: How) -> None:
    photo = noise()
    assert overlay(photo, heat_values(), opacity=0, blend=blend, normalize=how).tobytes() == photo.tobytes()


@pytest.mark.parametrize("name", ["inferno", "viridis", "gray", "jet"])
def test_opacity_1_gives_the_colours_of_the_map(name: str) -> None:
    values = heat_values()
    got = np.asarray(overlay(noise(), values, opacity=1, colormap=name))
    assert_colours(got, values.astype(np.float32).astype(float), float(values.min()), float(values.max()), name)


@pytest.mark.parametrize(
    ("how", "low", "high", "name"),
    [
        ("none", 0.0, 1.0, "inferno"),
        ("symmetric", -0.9, 0.9, "blue-white-red"),
        ("minmax", 0.1, 0.9, "inferno"),
        ("percentile", 0.108, 0.892, "inferno"),  # of 0.1 to 0.9 in equal steps
    ],
)
def test_opacity_1_follows_the_normalization(how: How, low: float, high: float, name: str) -> None:
    values = np.linspace(0.1, 0.9, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)
    assert_colours(np.asarray(overlay(noise(), values, opacity=1, normalize=how)), values, low, high, name)


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(st.lists(st.floats(-1000, 1000, width=32), min_size=12, max_size=12).filter(lambda v: max(v) - min(v) > 0.1))
def test_opacity_1_gives_the_colours_of_any_map(flat: list[float]) -> None:
    values = np.array(flat).reshape(3, 4)
    got = np.asarray(overlay(noise(3, 4), values, opacity=1))
    assert_colours(got, values, min(flat), max(flat), "inferno")


@pytest.mark.parametrize("opacity", [0.1, 0.25, 0.5, 0.7, 0.99])
def test_between_the_end_points_it_is_linear(opacity: float) -> None:
    photo, values = noise(), heat_values()
    colour = np.asarray(overlay(photo, values, opacity=1))
    got = np.asarray(overlay(photo, values, opacity=opacity)).astype(float)
    expected = mixed(np.asarray(photo), colour, np.full(values.shape, opacity))
    assert np.abs(got - expected).max() <= 1


@pytest.mark.parametrize("opacity", [0.3, 0.8, 1.0])
def test_value_blend_covers_by_the_value(opacity: float) -> None:
    photo, values = noise(), heat_values()
    colour = np.asarray(overlay(photo, values, opacity=1))
    share = opacity * (values - values.min()) / (values.max() - values.min())
    got = np.asarray(overlay(photo, values, opacity=opacity, blend="value")).astype(float)
    assert np.abs(got - mixed(np.asarray(photo), colour, share)).max() <= 1.5  # the share itself has 256 levels


def test_value_blend_of_signed_values_shows_the_photo_at_zero() -> None:
    heat = heatmap(GRID, meaning="cosine similarity", signed=True)
    signed = np.asarray(overlay(noise(), heat, opacity=1, blend="value")).astype(float)
    colour = np.asarray(overlay(noise(), heat, opacity=1))
    share = np.abs(heat.values.astype(float)) / np.abs(heat.grid).max()
    assert np.abs(signed - mixed(np.asarray(noise()), colour, share)).max() <= 2


def test_scale_of_a_heatmap_is_that_of_its_grid() -> None:
    """Its pixels do not reach the grid's ends: interpolation flattens a peak."""
    grid = np.zeros((6, 9))
    grid[2, 4] = 1
    place = Geometry((7, 11), (96, 144), Box(0, 0, 7, 11))
    heat = heatmap(grid, place)
    assert heat.values.max() < 0.9
    assert_colours(np.asarray(overlay(noise(7, 11), heat, opacity=1)), heat.values.astype(float), 0, 1, "inferno")


@pytest.mark.parametrize(("signed", "name"), [(False, "inferno"), (True, "blue-white-red")])
def test_the_sign_decides_the_colours(signed: bool, name: str) -> None:
    heat = heatmap(GRID, signed=signed)
    low = -5.0 if name == "blue-white-red" else 0.0
    assert_colours(np.asarray(overlay(noise(), heat, opacity=1)), heat.values.astype(float), low, 5.0, name)


@pytest.mark.parametrize("signed", [False, True])
def test_normalized_heatmap_has_the_picture_of_the_raw_one(signed: bool) -> None:
    heat = heatmap(GRID, signed=signed)
    raw = np.asarray(overlay(noise(), heat, opacity=1)).astype(int)
    assert np.abs(np.asarray(overlay(noise(), normalize(heat), opacity=1)).astype(int) - raw).max() <= 6  # a level at a tie


def test_shared_scale_is_kept_when_a_panel_is_drawn() -> None:
    """A weak panel beside a strong one must stay dark."""
    heat = normalize(heatmap([[[0.0, 0.1]], [[0.0, 1.0]]], axes=("head",)), shared=("head",))
    weak = np.asarray(overlay(noise(), heat.at(head=0), opacity=1))
    assert_colours(weak, heat.values[0].astype(float), 0, 1, "inferno")


# ---- what stays as it was ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blend", ["constant", "value"])
@pytest.mark.parametrize("opacity", [0.5, 1.0])
def test_photo_is_untouched_where_the_model_did_not_see(blend: Literal["constant", "value"], opacity: float) -> None:
    photo, heat = noise(), heatmap(GRID, CROPPED)
    got, before = np.asarray(overlay(photo, heat, opacity=opacity, blend=blend)), np.asarray(photo)
    unseen = np.ones((HEIGHT, WIDTH), bool)
    unseen[4:20, 6:30] = False
    assert np.array_equal(got[unseen], before[unseen])
    assert (got[~unseen] != before[~unseen]).any(axis=1).mean() > 0.9


def test_pixels_behind_the_last_patch_are_untouched() -> None:
    """230 pixels by patches of 16 make 14 patches; the last 6 pixels were never seen."""
    photo = noise(230, 230)
    tensor = torch.rand(14, 14, generator=torch.Generator().manual_seed(0))
    layout = TokenLayout("tokens", (), (14, 14), Box(0, 0, 224, 224))
    heat = AttentionMap(tensor, (), layout, {}, "attention").to_heatmap(Geometry((230, 230), (230, 230), Box(0, 0, 230, 230)))
    changed = (np.asarray(overlay(photo, heat)) != np.asarray(photo)).any(axis=2)
    assert changed[:224, :224].mean() > 0.98
    assert not changed[224:].any()
    assert not changed[:, 224:].any()


NOTHING_SEEN = """
import torch
from PIL import Image
from visattn.geometry import Box, Geometry
from visattn.maps import AttentionMap
from visattn.records import TokenLayout
from visattn.drawing import overlay
layout = TokenLayout("tokens", (), (2, 3), Box(0, 0, 32, 48))
place = Geometry((1, 1000), (32, 48), Box(0.05, 499.6, 0.95, 500.4))
heat = AttentionMap(torch.rand(2, 3), (), layout, {}, "attention").to_heatmap(place)
photo = Image.new("RGB", (1000, 1), (9, 8, 7))
print(overlay(photo, heat).tobytes() == photo.tobytes(), overlay(photo, heat, blend="value").tobytes() == photo.tobytes())
"""


@pytest.mark.full
def test_photo_of_which_nothing_was_seen_comes_back() -> None:
    """In a process of its own: OpenCV divides by the size of an empty array, which kills it."""
    done = subprocess.run([sys.executable, "-c", NOTHING_SEEN], capture_output=True, text=True, timeout=60, check=False)
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
    """A photo of half the light gives a picture that is darker by half the photo's part, so that a video does not flicker."""
    bright = np.asarray(noise()) // 2 * 2
    values = heat_values()
    first = np.asarray(overlay(bright, values, opacity=opacity)).astype(float)
    second = np.asarray(overlay(bright // 2, values, opacity=opacity)).astype(float)
    assert np.abs(first - second - (1 - opacity) * bright / 2).max() <= 1


# ---- maps that show nothing, or nothing true --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, 1e-45, -3.0], ids=["0", "1", "1e-30", "denormal", "-3"])
@pytest.mark.parametrize("how", ["auto", "minmax", "percentile"])
def test_constant_map_gives_the_photo_and_a_warning(value: float, how: How) -> None:
    photo = noise()
    with pytest.warns(VisattnWarning, match=r"the map is constant \(.*\); nothing to show"):
        picture = overlay(photo, np.full((HEIGHT, WIDTH), value, np.float32), normalize=how, opacity=1)
    assert picture.tobytes() == photo.tobytes()


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30], ids=["0", "1", "1e-30"])
def test_constant_heatmap_gives_the_photo_and_a_warning(value: float) -> None:
    with pytest.warns(VisattnWarning, match="the map is constant"):
        assert overlay(noise(), heatmap(np.full((2, 3), value))).tobytes() == noise().tobytes()


def test_constant_heatmap_is_still_constant_when_normalized() -> None:
    with pytest.warns(VisattnWarning, match="the map is constant"):
        picture = overlay(noise(), normalize(heatmap(np.full((2, 3), 0.2))))
    assert picture.tobytes() == noise().tobytes()


@pytest.mark.parametrize(("base", "step"), [(1e-3, 2.0**-32), (1e7, 1.0), (-1e7, 1.0), (3e30, 2.0**82), (1.0, 2.0**-20)])
@pytest.mark.parametrize("how", ["minmax", "percentile"])
def test_nearly_constant_map_uses_the_whole_color_map(base: float, step: float, how: How) -> None:
    """Against float64: of a base of 1e7 and a span of 2, levels 64 to 191 would come out of products in float32."""
    values = (
        np.float32(base) + np.float32(step) * (np.arange(HEIGHT * WIDTH) * 5 // (HEIGHT * WIDTH)).astype(np.float32)
    ).reshape(HEIGHT, WIDTH)
    exact = values.astype(np.float64)
    low, high = (exact.min(), exact.max()) if how == "minmax" else np.percentile(exact, (1, 99))
    levels = ((exact - low) / (high - low)).clip(0, 1) * 255
    drawn = np.asarray(colorize(values, normalize=how))
    expected = table("inferno")[levels.round().astype(int)]
    near = [
        np.abs(drawn.astype(int) - table("inferno")[(levels + shift).round().clip(0, 255).astype(int)]).max(-1)
        for shift in (-0.6, 0, 0.6)
    ]
    assert np.min(near, axis=0).max() == 0
    assert (drawn[0, 0] == expected[0, 0]).all()
    assert (drawn[-1, -1] == expected[-1, -1]).all()


@pytest.mark.parametrize(("value", "level"), [(0.0, 0), (0.2, 51), (1.0, 255)])
def test_constant_map_under_none_is_drawn(value: float, level: int) -> None:
    got = np.asarray(overlay(noise(), np.full((HEIGHT, WIDTH), value), normalize="none", opacity=1))
    assert np.array_equal(got, np.broadcast_to(table("inferno")[level], got.shape))


@pytest.mark.parametrize("values", [[0.0, 1.2], [-0.1, 1.0]], ids=["above", "below"])
def test_normalization_none_refuses_values_outside_0_to_1(values: list[float]) -> None:
    with pytest.raises(MapError, match=r"normalize='none' takes values in \[0, 1\], got"):
        overlay(noise(1, 2), np.array([values]), normalize="none")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("how", ["auto", "minmax", "none", "percentile", "symmetric"])
def test_array_that_is_not_finite_is_refused_and_counted(how: How, bad: float) -> None:
    values = heat_values()
    values[3, 5] = values[20, 30] = bad
    with pytest.raises(MapError, match="2 of 864 map values are NaN or infinite; nothing is drawn"):
        overlay(noise(), values, normalize=how)


def test_array_of_nothing_but_nan_is_refused() -> None:
    with pytest.raises(MapError, match="864 of 864 map values"):
        overlay(noise(), np.full((HEIGHT, WIDTH), np.nan))


def test_single_outlier_under_percentile_is_not_called_constant() -> None:
    values = np.zeros((HEIGHT, WIDTH))
    values[3, 4] = 1e6
    got = np.asarray(overlay(noise(), values, normalize="percentile", opacity=1))
    assert np.array_equal(got[3, 4], table("inferno")[255])
    assert np.array_equal(got[10, 10], table("inferno")[0])


# ---- arrays of every kind ---------------------------------------------------------------------------------------------------------

LEVELS = np.random.default_rng(5).permutation(np.arange(HEIGHT * WIDTH) % 256).reshape(HEIGHT, WIDTH)
ARRAYS: dict[str, Callable[[], Any]] = {
    "uint8": lambda: LEVELS.astype(np.uint8),
    "int8": lambda: (LEVELS - 128).astype(np.int8),
    "int64": lambda: LEVELS.astype(np.int64) * 10_000,
    "uint16": lambda: LEVELS.astype(np.uint16) * 200,
    "float16": lambda: LEVELS.astype(np.float16),
    "float32": lambda: LEVELS.astype(np.float32),
    "float64": lambda: LEVELS.astype(np.float64),
    "big endian": lambda: LEVELS.astype(">f4"),
    "Fortran order": lambda: np.asfortranarray(LEVELS.astype(np.float32)),
    "negative strides": lambda: np.ascontiguousarray(LEVELS.astype(np.float32)[::-1, ::-1])[::-1, ::-1],
    "every second": lambda: np.repeat(np.repeat(LEVELS.astype(np.float32), 2, 0), 2, 1)[::2, ::2],
    "tensor": lambda: torch.from_numpy(LEVELS),
    "float tensor": lambda: torch.from_numpy(LEVELS).float(),
    "half tensor": lambda: torch.from_numpy(LEVELS).half(),
    "bfloat16 tensor": lambda: torch.from_numpy(LEVELS).bfloat16(),
    "tensor with gradient": lambda: torch.from_numpy(LEVELS).float().requires_grad_(),
    "transposed tensor": lambda: torch.from_numpy(np.ascontiguousarray(LEVELS.T)).float().T,
    "list": lambda: LEVELS.tolist(),
}
kinds = pytest.mark.parametrize("kind", ARRAYS)


@kinds
def test_array_of_any_kind_has_the_colours_of_its_values(kind: str) -> None:
    expected = table("inferno")[LEVELS]
    assert np.array_equal(np.asarray(overlay(noise(), ARRAYS[kind](), opacity=1)), expected)


@kinds
def test_colorize_takes_arrays_of_any_kind(kind: str) -> None:
    assert np.array_equal(np.asarray(colorize(ARRAYS[kind]())), table("inferno")[LEVELS])


@pytest.mark.parametrize("kind", ["uint8", "int64", "float32", "negative strides", "Fortran order"])
def test_array_is_not_modified_and_may_be_read_only(kind: str) -> None:
    array: NDArray[Any] = ARRAYS[kind]()
    before = array.copy()
    array.flags.writeable = False
    overlay(noise(), array, blend="value", contours=(0.3,), normalize="percentile")
    assert np.array_equal(array, before)


def test_boolean_array_is_lowest_and_highest_colour() -> None:
    got = np.asarray(overlay(noise(), LEVELS > 99, opacity=1))
    assert np.array_equal(got, np.where((LEVELS > 99)[..., None], table("inferno")[255], table("inferno")[0]))


@pytest.mark.parametrize("kind", ["uint8 CHW", "float CHW", "tensor", "read-only", "negative strides"])
def test_photo_of_any_kind_gives_the_same_overlay(kind: str) -> None:
    pixels = np.array(noise())
    photos: dict[str, Any] = {
        "uint8 CHW": pixels.transpose(2, 0, 1),
        "float CHW": pixels.transpose(2, 0, 1).astype(np.float32) / 255,
        "tensor": torch.from_numpy(pixels).permute(2, 0, 1),
        "read-only": np.asarray(noise()),
        "negative strides": np.ascontiguousarray(pixels[::-1, :, ::-1])[::-1, :, ::-1],
    }
    expected = overlay(noise(), heat_values(), opacity=0.5)
    assert overlay(photos[kind], heat_values(), opacity=0.5).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int64", "float16", "float32", "float64"], ids=str)
def test_hotter_value_is_always_lighter(dtype: str) -> None:
    """Values that wrap when a mask of 8 bits is squared or doubled."""
    values = np.array([[0, 15, 16, 128, 240, 255]], dtype)
    got = np.asarray(overlay(noise(1, 6), values, opacity=1)).astype(float)[0]
    light = (got @ [0.2126, 0.7152, 0.0722]).tolist()
    assert light == sorted(set(light))
    assert got[0].tolist() == table("inferno")[0].tolist()
    assert got[-1].tolist() == table("inferno")[255].tolist()


@pytest.mark.parametrize(
    ("heat", "message"),
    [
        pytest.param(
            np.zeros((WIDTH, HEIGHT)), r"must be \(height, width\) = \(24, 36\) like the photo, got \(36, 24\)", id="turned"
        ),
        pytest.param(np.zeros((14, 14)), r"got \(14, 14\). Bring a map to pixels with map.to_heatmap", id="grid"),
        pytest.param(np.zeros((1, HEIGHT, WIDTH)), r"got \(1, 24, 36\)", id="1HW"),
        pytest.param(np.zeros((3, HEIGHT, WIDTH)), r"got \(3, 24, 36\)", id="CHW"),
        pytest.param(torch.zeros(1, 1, HEIGHT, WIDTH), r"got \(1, 1, 24, 36\)", id="NCHW"),
        pytest.param(np.zeros((HEIGHT, WIDTH), complex), "must hold numbers, got complex128", id="complex"),
        pytest.param([["a"]], "must hold numbers, got <U1", id="text"),
    ],
)
def test_heat_that_is_not_of_the_photos_size_is_refused(heat: object, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        overlay(noise(), heat)


def test_heatmap_of_several_panels_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"draws one panel, the heatmap has the axes \('head',\). Choose with .at\(\)"):
        overlay(noise(), heatmap([GRID, GRID], axes=("head",)))


def test_photo_that_is_a_batch_is_refused() -> None:
    with pytest.raises(ImageError, match="not a batch"):
        overlay(np.zeros((2, HEIGHT, WIDTH, 3), np.uint8), heat_values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opacity": 1.5}, "opacity must be a number from 0 to 1, got 1.5"),
        ({"opacity": float("nan")}, "opacity must be a number from 0 to 1, got nan"),
        ({"opacity": "half"}, "opacity must be a number from 0 to 1, got 'half'"),
        ({"contours": (0.5, 60)}, "contour level must be a number from 0 to 1, got 60"),
        ({"blend": "values"}, "unknown blend 'values'; did you mean 'value'"),
        ({"colormap": "viridus"}, "unknown colormap 'viridus'; did you mean 'viridis'"),
        ({"normalize": "max"}, "unknown normalization 'max'"),
    ],
    ids=str,
)
def test_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        overlay(noise(), heat_values(), **options)


# ---- lines and marks --------------------------------------------------------------------------------------------------------------


def far_from_border(mask: NDArray[np.bool_], distance: int) -> NDArray[np.bool_]:
    """Pixels whose whole neighbourhood is inside or whole neighbourhood is outside."""
    far = np.zeros(mask.shape, bool)
    for y, x in np.ndindex(*mask.shape):
        around = mask[max(0, y - distance) : y + distance + 1, max(0, x - distance) : x + distance + 1]
        far[y, x] = around.all() or not around.any()
    return far


@pytest.fixture(scope="module")
def blob() -> NDArray[np.bool_]:
    """Two regions, one with a hole."""
    y, x = np.mgrid[:60, :90]
    ring_like = (np.hypot(y - 30, x - 28) < 22) & (np.hypot(y - 30, x - 28) > 9)
    shape: NDArray[np.bool_] = ring_like | ((y > 20) & (y < 40) & (x > 65) & (x < 80))
    return shape


def test_outline_draws_near_the_border_only(blob: NDArray[np.bool_]) -> None:
    photo = noise(60, 90)
    changed = (np.asarray(outline(photo, blob)) != np.asarray(photo)).any(axis=2)
    assert not (changed & far_from_border(blob, 4)).any()
    assert changed[~far_from_border(blob, 1)].mean() > 0.9


def test_outline_shows_on_white_and_on_black(blob: NDArray[np.bool_]) -> None:
    on_white = np.asarray(outline(Image.new("RGB", (90, 60), (255, 255, 255)), blob))
    on_black = np.asarray(outline(Image.new("RGB", (90, 60)), blob))
    assert on_white.min() < 30
    assert on_black.max() > 225


@pytest.mark.parametrize("value", [False, True], ids=["empty", "full"])
def test_outline_of_a_mask_without_border_leaves_the_middle(value: bool) -> None:
    photo = noise(60, 90)
    got = np.asarray(outline(photo, np.full((60, 90), value)))
    assert np.array_equal(got[4:-4, 4:-4], np.asarray(photo)[4:-4, 4:-4])


def test_outline_of_a_heatmap_is_where_it_reaches_one_half() -> None:
    photo, heat = noise(), heatmap([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    assert outline(photo, heat).tobytes() == outline(photo, heat.values >= 0.5).tobytes()


@pytest.mark.parametrize("draw", [outline, spotlight])
def test_mask_of_another_size_is_refused(draw: Callable[[Image.Image, Any], Image.Image]) -> None:
    with pytest.raises(ShapeError, match=r"a mask must be \(height, width\) = \(24, 36\) like the picture, got \(36, 24\)"):
        draw(noise(), np.ones((WIDTH, HEIGHT), bool))


def test_outline_does_not_modify_picture_or_mask(blob: NDArray[np.bool_]) -> None:
    photo, before = noise(60, 90), blob.copy()
    outline(photo, blob)
    assert photo.tobytes() == noise(60, 90).tobytes()
    assert np.array_equal(blob, before)


def test_spotlight_keeps_the_photo_inside_and_darkens_the_rest(blob: NDArray[np.bool_]) -> None:
    photo = noise(60, 90)
    got, before = np.asarray(spotlight(photo, blob)).astype(int), np.asarray(photo).astype(int)
    far = far_from_border(blob, 4)
    assert np.array_equal(got[far & blob], before[far & blob])
    outside = got[far & ~blob]
    assert np.ptp(outside, axis=1).max() == 0  # grey
    assert outside.max() <= 0.3 * 255


@pytest.mark.parametrize("opacity", [0.0, 0.5, 1.0])
def test_contours_draw_near_their_level_only(opacity: float) -> None:
    y, x = np.mgrid[:60, :90]
    values = np.exp(-((y - 30.0) ** 2 + (x - 40.0) ** 2) / 300)
    photo = noise(60, 90)
    without = np.asarray(overlay(photo, values, opacity=opacity))
    drawn = (np.asarray(overlay(photo, values, opacity=opacity, contours=(0.5,))) != without).any(axis=2)
    inside = values >= values.min() + 0.5 * (values.max() - values.min())
    assert not (drawn & far_from_border(inside, 4)).any()
    assert drawn[~far_from_border(inside, 1)].mean() > 0.9


SINK = (Sink(0, 2, 20.0, "blocks.1"),)


def test_sinks_are_ringed_and_the_ring_is_around_their_patch() -> None:
    place = Geometry((120, 180), (32, 48), Box(0, 0, 120, 180))
    heat, photo = heatmap(GRID, place, sinks=SINK), noise(120, 180)
    plain, marked = overlay(photo, heat, marks=False), overlay(photo, heat)
    rows, columns = np.nonzero((np.asarray(plain) != np.asarray(marked)).any(axis=2))
    assert (rows.mean(), columns.mean()) == pytest.approx((30, 150), abs=1)  # patch 0,2 is y 0 to 60, x 120 to 180
    assert max(np.ptp(rows), np.ptp(columns)) < 20


@pytest.mark.parametrize("opacity", [0.0, 1.0])
def test_exact_end_points_have_no_rings(opacity: float) -> None:
    heat, photo = heatmap(GRID, sinks=SINK), noise()
    assert heat.marks
    assert overlay(photo, heat, opacity=opacity).tobytes() == overlay(photo, heat, opacity=opacity, marks=False).tobytes()


def test_ring_leaves_its_middle_and_the_rest_alone() -> None:
    photo = noise(300, 600)
    changed = (np.asarray(ring(photo, [(40, 60)])) != np.asarray(photo)).any(axis=2)
    y, x = np.mgrid[:300, :600]
    distance = np.hypot(y - 40, x - 60)
    assert changed.any()
    assert not changed[distance > 15].any()
    assert not changed[distance < 5].any()


# ---- colours alone, components, files ---------------------------------------------------------------------------------------------


def test_colorize_is_the_colour_map_and_black_where_nothing_was_seen() -> None:
    heat = heatmap(GRID, CROPPED)
    got = np.asarray(colorize(heat, colormap="viridis"))
    assert_colours(got[4:20, 6:30], heat.values[4:20, 6:30].astype(float), 0, 5, "viridis")
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


def test_components_show_the_photo_where_the_model_did_not_see() -> None:
    heat = component_heat(Geometry((HEIGHT, WIDTH), (64, 96), Box(4, 6, 20, 30)))
    got, before = np.asarray(rgb_components(noise(), heat)), np.asarray(noise())
    unseen = np.ones((HEIGHT, WIDTH), bool)
    unseen[4:20, 6:30] = False
    assert np.array_equal(got[unseen], before[unseen])
    assert (got[~unseen] != before[~unseen]).any(axis=1).mean() > 0.9


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3])
def test_constant_component_is_one_colour_not_noise(value: float) -> None:
    """The last digits that interpolation leaves must not be stretched to black and white."""
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


def test_a_single_contour_and_a_whole_opacity_are_numbers_too() -> None:
    photo, heat = np.zeros((32, 48, 3), np.uint8), np.random.default_rng(0).random((32, 48), np.float32)
    assert overlay(photo, heat, contours=0.5).tobytes() == overlay(photo, heat, contours=[0.5]).tobytes()
    for levels in (np.float32(0.5), np.array(0.5), np.array([0.5], np.float32)):
        assert overlay(photo, heat, contours=levels).tobytes() == overlay(photo, heat, contours=0.5).tobytes()  # type: ignore[arg-type]
    assert overlay(photo, heat, opacity=True).tobytes() == overlay(photo, heat, opacity=1).tobytes()
