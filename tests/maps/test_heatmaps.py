"""Interpolation from the grid to the photo, pixel by pixel: geometry, and parts that the model did not receive."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from PIL import Image

from tests.maps.making import WINDOWS, make_map, quick, random_map
from tests.oracles.heatmaps import mix_bicubic, mix_bilinear, mix_nearest, slow_heat
from visattn import load_image
from visattn._support.opencv import cv2
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, normalize
from visattn.core.provenance import Sink
from visattn.core.records import TokenLayout
from visattn.errors import MapError, OptionError

windows = pytest.mark.parametrize("geometry", WINDOWS.values(), ids=WINDOWS.keys())


@windows
@pytest.mark.parametrize(
    ("interpolation", "mix"),
    [("bilinear", mix_bilinear), ("nearest", mix_nearest), ("bicubic", mix_bicubic)],
    ids=["bilinear", "nearest", "bicubic"],
)
def test_every_pixel_is_mixed_from_the_cells_around_its_center(
    interpolation: Literal["bilinear", "nearest", "bicubic"],
    mix: Callable[[NDArray[np.float64], float, float], float],
    geometry: Geometry,
) -> None:
    attention_map = random_map()
    expected = slow_heat(attention_map.values.double().numpy(), geometry, 16, mix)
    heat = attention_map.to_heatmap(geometry, interpolation)
    assert heat.values.dtype == np.float32
    assert heat.values.shape == geometry.photo
    np.testing.assert_allclose(heat.values, expected, atol=1e-6)


@pytest.mark.parametrize("photo", [(60, 91), (91, 60), (7, 5), (33, 33)], ids=["landscape", "portrait", "tiny", "square"])
def test_uncropped_heatmap_equals_opencv_and_torch(photo: tuple[int, int]) -> None:
    attention_map = random_map(6, 9)
    heat = attention_map.to_heatmap(Geometry(photo, (96, 144), Box(0, 0, *photo))).values
    by_torch = torch.nn.functional.interpolate(attention_map.values[None, None], photo, mode="bilinear", align_corners=False)
    np.testing.assert_allclose(heat, by_torch[0, 0].numpy(), atol=1e-6)
    by_opencv = cv2.resize(attention_map.values.numpy(), photo[::-1], interpolation=cv2.INTER_LINEAR)
    np.testing.assert_allclose(heat, by_opencv, atol=2e-5)


@pytest.mark.parametrize("photo", [(60, 91), (91, 60), (33, 33)], ids=["landscape", "portrait", "square"])
def test_uncropped_bicubic_heatmap_equals_clipped_torch(photo: tuple[int, int]) -> None:
    attention_map = random_map(6, 9)
    grid = attention_map.values
    expected = torch.nn.functional.interpolate(grid[None, None], photo, mode="bicubic", align_corners=False)[0, 0]
    heat = attention_map.to_heatmap(Geometry(photo, (96, 144), Box(0, 0, *photo)), "bicubic").values
    np.testing.assert_allclose(heat, expected.clamp(grid.min(), grid.max()).numpy(), atol=1e-6)


@quick
@given(
    st.lists(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), min_size=2, max_size=2),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(["nearest", "bilinear", "bicubic"]),
)
def test_no_pixel_leaves_the_range_of_the_grid(
    grid: list[list[float]], height: int, width: int, interpolation: Literal["nearest", "bilinear", "bicubic"]
) -> None:
    attention_map = make_map(torch.tensor(grid))
    heat = attention_map.to_heatmap(Geometry((height, width), (32, 48), Box(0, 0, height, width)), interpolation)
    slack = 1e-5 * float(np.abs(heat.grid).max())
    assert heat.grid.min() - slack <= heat.values.min()
    assert heat.values.max() <= heat.grid.max() + slack


def test_every_panel_of_a_map_is_resampled_the_same_way() -> None:
    attention_map = random_map(2, 3, 4, 5, axes=("layer", "head"))
    geometry = WINDOWS["crop"]
    heat = attention_map.to_heatmap(geometry)
    alone = attention_map.at(layer=2, head=4).to_heatmap(geometry)
    assert heat.values.shape == (4, 5, *geometry.photo)
    np.testing.assert_allclose(heat.at(layer=2, head=4).values, alone.values, atol=1e-7)
    assert np.array_equal(heat.at(layer=2, head=4).grid, alone.grid)


TOP_RIGHT = {
    "landscape": Geometry((60, 120), (64, 96), Box(0, 0, 60, 120)),
    "portrait": Geometry((150, 60), (64, 96), Box(0, 0, 150, 60)),
    "cropped": Geometry((120, 200), (64, 96), Box(10, 40, 110, 160)),
    "padded": Geometry((108, 120), (64, 96), Box(-6, -4, 114, 124)),
}


@pytest.mark.parametrize("geometry", TOP_RIGHT.values(), ids=TOP_RIGHT.keys())
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_last_patch_of_the_first_row_lights_the_top_right(
    interpolation: Literal["nearest", "bilinear", "bicubic"], geometry: Geometry
) -> None:
    one_hot = torch.zeros(4, 6)
    one_hot[0, -1] = 1
    attention_map = make_map(one_hot)
    heat = attention_map.to_heatmap(geometry, interpolation).values
    y, x = (int(i) for i in np.unravel_index(heat.argmax(), heat.shape))
    assert geometry.patch_at(y + 0.5, x + 0.5, (4, 6), attention_map.layout.box) == (0, 5)
    rows, columns = np.mgrid[: heat.shape[0], : heat.shape[1]] + 0.5
    center = (rows * heat).sum() / heat.sum(), (columns * heat).sum() / heat.sum()
    patch_height, patch_width = geometry.window.height / 4, geometry.window.width / 6
    assert center[0] == pytest.approx(geometry.window.top + patch_height / 2, abs=0.3 * patch_height)
    assert center[1] == pytest.approx(geometry.window.right - patch_width / 2, abs=0.3 * patch_width)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_top_right_patch_lights_the_top_right_of_the_upright_photo(orientation: int) -> None:
    upright = Image.new("RGB", (60, 40))
    upright.paste((255, 255, 255), (50, 0, 60, 10))
    operations = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    operation = operations[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    (upright if operation is None else upright.transpose(operation)).save(stream, "PNG", exif=exif)
    photo = load_image(stream.getvalue())
    one_hot = torch.zeros(4, 6)
    one_hot[0, -1] = 1
    geometry = Geometry((photo.height, photo.width), (64, 96), Box(0, 0, photo.height, photo.width))
    heat = make_map(one_hot).to_heatmap(geometry, "nearest").values
    assert np.array_equal(heat > 0.5, np.asarray(photo)[..., 0] > 128)


def test_input_pixels_beyond_the_last_full_patch_are_not_covered() -> None:
    """Divide 230 pixels into patches of 16: 14 patches, and 6 pixels that the model never uses."""
    geometry = Geometry((460, 230), (230, 230), Box(0, 0, 460, 230))
    heat = make_map(torch.ones(14, 14), box=Box(0, 0, 224, 224)).to_heatmap(geometry)
    assert heat.seen == Box(0, 0, 448, 224)
    assert np.allclose(heat.values[:448, :224], 1)
    assert not heat.values[448:].any()
    assert not heat.values[:, 224:].any()


def test_unseen_pixels_are_zero() -> None:
    heat = make_map(torch.full((2, 3), 7.0)).to_heatmap(Geometry((40, 64), (32, 48), Box(4, 16, 36, 48)))
    assert heat.seen == Box(4, 16, 36, 48)
    outside = np.ones((40, 64), bool)
    outside[4:36, 16:48] = False
    assert not heat.values[outside].any()
    assert np.allclose(heat.values[~outside], 7)


def test_crop_between_pixel_centers_has_an_empty_seen_box() -> None:
    """Take the center crop of a photo one pixel wide, which may fall between two pixel centers."""
    heat = random_map().to_heatmap(Geometry((1, 1000), (32, 48), Box(0.05, 499.6, 0.95, 500.4)))
    assert heat.seen.width == 0
    assert not heat.values.any()


def test_values_of_the_map_are_not_modified() -> None:
    attention_map = random_map()
    before = attention_map.values.clone()
    heat = normalize(attention_map.to_heatmap(WINDOWS["crop"]))
    heat.values[:] = 5
    assert torch.equal(attention_map.values, before)


def test_half_precision_map_with_gradient_is_accepted() -> None:
    attention_map = make_map(torch.tensor([[0.0, 0.5, 1.0]]).bfloat16().requires_grad_())
    heat = attention_map.to_heatmap(Geometry((1, 3), (16, 48), Box(0, 0, 1, 3)))
    assert heat.values.tolist() == [[0.0, 0.5, 1.0]]


def test_heatmap_records_geometry_and_interpolation() -> None:
    heat = random_map().to_heatmap(WINDOWS["crop"], "nearest")
    assert heat.provenance.geometry == WINDOWS["crop"]
    assert heat.provenance.parameters == {"interpolation": "nearest"}


def test_marks_are_the_centers_of_the_sinks_patches() -> None:
    sinks = ((Sink(0, 2, 30.0, "blocks.1"), Sink(1, 0, 9.0, "blocks.1")),)
    heat = make_map(torch.rand(2, 3), sinks=sinks).to_heatmap(Geometry((20, 60), (32, 48), Box(0, 0, 20, 60)))
    assert heat.marks == ((5, 50), (15, 10))


@pytest.mark.parametrize(
    ("attention_map", "geometry", "message"),
    [
        pytest.param(
            random_map(2, 3, 1, axes=("batch",)),
            WINDOWS["crop"],
            r"a heatmap shows one photo. Choose one image.*at\(batch=0\)",
            id="batch",
        ),
        pytest.param(
            random_map(),
            Geometry((9, 9), (16, 16), Box(0, 0, 9, 9)),
            r"made for 48 x 32 input pixels",
            id="map of a larger input",
        ),
        pytest.param(
            random_map(),
            Geometry((9, 9), (96, 96), Box(0, 0, 9, 9)),
            r"made for 48 x 32 input pixels",
            id="map of a smaller input",
        ),
        pytest.param(
            AttentionMap(torch.rand(2, 2, 2), (), TokenLayout("t", (), (2, 2, 2), Box(0, 0, 32, 32)), {}, "attention"),
            WINDOWS["crop"],
            r"needs a grid of rows and columns, got \(2, 2, 2\)",
            id="video",
        ),
    ],
)
def test_map_that_does_not_belong_to_the_photo_is_refused(attention_map: AttentionMap, geometry: Geometry, message: str) -> None:
    with pytest.raises(MapError, match=message):
        attention_map.to_heatmap(geometry)


def test_unknown_interpolation_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(OptionError, match="unknown interpolation 'bilinar'; did you mean 'bilinear'"):
        random_map().to_heatmap(WINDOWS["crop"], "bilinar")  # type: ignore[arg-type]
