"""Overlays of constant maps, and of arrays of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.drawing.overlaying import GRID, HEIGHT, WIDTH, How, heat_values, heatmap, noise
from visattn.core.drawing.colormaps import table
from visattn.core.drawing.overlays import colorize, overlay
from visattn.core.maps import normalize
from visattn.errors import ImageError, MapError, OptionError, ShapeError, VisattnWarning


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, 1e-45, -3.0], ids=["0", "1", "1e-30", "denormal", "-3"])
@pytest.mark.parametrize("how", ["auto", "minmax", "percentile"])
def test_constant_map_gives_the_photo_and_a_warning(value: float, how: How) -> None:
    photo = noise()
    with pytest.warns(VisattnWarning, match=r"the map is constant \(.*\); the photo is unchanged"):
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
def test_nearly_constant_map_uses_the_full_colormap(base: float, step: float, how: How) -> None:
    """Compare with float64: for base 1e7 and span 2, products in float32 would yield only levels 64 to 191."""
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
def test_constant_map_without_normalization_is_drawn(value: float, level: int) -> None:
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
def test_array_of_any_kind_has_the_colors_of_its_values(kind: str) -> None:
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


def test_boolean_array_is_lowest_and_highest_color() -> None:
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
    """Check values that overflow when an 8-bit mask is squared or doubled."""
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
        pytest.param(np.zeros((14, 14)), r"got \(14, 14\). Convert a map to pixels with map.to_heatmap", id="grid"),
        pytest.param(np.zeros((1, HEIGHT, WIDTH)), r"got \(1, 24, 36\)", id="1HW"),
        pytest.param(np.zeros((3, HEIGHT, WIDTH)), r"got \(3, 24, 36\)", id="CHW"),
        pytest.param(torch.zeros(1, 1, HEIGHT, WIDTH), r"got \(1, 1, 24, 36\)", id="NCHW"),
        pytest.param(np.zeros((HEIGHT, WIDTH), complex), "must hold numbers, got complex128", id="complex"),
        pytest.param([["a"]], "must hold numbers, got <U1", id="text"),
    ],
)
def test_array_of_another_size_than_the_photo_is_refused(heat: object, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        overlay(noise(), heat)


def test_heatmap_of_several_panels_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"draws one panel, but the heatmap has the axes \('head',\). Select one with .at\(\)"):
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
