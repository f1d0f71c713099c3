from __future__ import annotations

import io
import itertools
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from visattn._support.opencv import cv2
from visattn.errors import MapError, OptionError, ShapeError
from visattn.geometry import Box, Geometry
from visattn.images import load_image
from visattn.maps import AttentionMap, Heatmap, MapFacts, load_map, normalize, save_map, value_range
from visattn.provenance import Provenance, Sink
from visattn.records import TokenLayout

quick = settings(max_examples=60, derandomize=True, deadline=None, database=None)


def make_map(
    values: Tensor | NDArray[Any] | list[Any],
    axes: tuple[str, ...] = (),
    *,
    box: Box | None = None,
    labels: Mapping[str, tuple[str, ...]] | None = None,
    meaning: str = "attention",
    provenance: Provenance | None = None,
    sinks: tuple[tuple[Sink, ...], ...] = (),
) -> AttentionMap:
    """A map whose patches have 16 pixels."""
    tensor = torch.as_tensor(values)
    grid = (int(tensor.shape[-2]), int(tensor.shape[-1]))
    layout = TokenLayout("tokens", ("cls",), grid, box or Box(0, 0, 16 * grid[0], 16 * grid[1]))
    facts = MapFacts(sinks=sinks)
    return AttentionMap(tensor, axes, layout, labels or {}, meaning, provenance or Provenance(versions={}), facts=facts)


def random_map(rows: int = 2, columns: int = 3, *leading: int, axes: tuple[str, ...] = ()) -> AttentionMap:
    return make_map(torch.rand(*leading, rows, columns, generator=torch.Generator().manual_seed(0)), axes)


WINDOWS = {
    "landscape": Geometry((30, 44), (32, 48), Box(0, 0, 30, 44)),
    "portrait": Geometry((77, 40), (32, 48), Box(0, 0, 77, 40)),
    "crop": Geometry((40, 64), (32, 48), Box(2.5, 14, 37.5, 49.25)),
    "padding": Geometry((50, 60), (32, 48), Box(-5.25, -2, 54.75, 62)),
    "crop and padding": Geometry((50, 60), (32, 48), Box(-5.25, 8, 54.75, 40)),
    "smaller than the grid": Geometry((1, 2), (32, 48), Box(0, 0, 1, 2)),
    "rest of the input": Geometry((45, 60), (38, 60), Box(0, 0, 45, 60)),
}
windows = pytest.mark.parametrize("geometry", WINDOWS.values(), ids=WINDOWS.keys())


def slow_heat(
    grid: NDArray[np.float64], geometry: Geometry, cell: float, mix: Callable[[NDArray[np.float64], float, float], float]
) -> NDArray[np.float64]:
    """Each pixel's centre carried to the grid by hand; `cell` is the side of a grid cell in input pixels."""
    height, width = geometry.photo
    window = geometry.window
    heat = np.zeros((height, width))
    for i in range(height):
        for j in range(width):
            y = (i + 0.5 - window.top) * geometry.input[0] / (window.bottom - window.top) / cell
            x = (j + 0.5 - window.left) * geometry.input[1] / (window.right - window.left) / cell
            if 0 <= y < grid.shape[0] and 0 <= x < grid.shape[1]:
                heat[i, j] = mix(grid, y, x)
    return heat


def mix_nearest(grid: NDArray[np.float64], y: float, x: float) -> float:
    return float(grid[int(y), int(x)])


def mix_bilinear(grid: NDArray[np.float64], y: float, x: float) -> float:
    total = 0.0
    for r in range(-1, grid.shape[0] + 1):  # the grid with its edge cells repeated once around it
        for c in range(-1, grid.shape[1] + 1):
            tent = max(0.0, 1 - abs(y - (r + 0.5))) * max(0.0, 1 - abs(x - (c + 0.5)))
            total += tent * grid[min(max(r, 0), grid.shape[0] - 1), min(max(c, 0), grid.shape[1] - 1)]
    return total


def keys_weight(distance: float) -> float:
    d, a = abs(distance), -0.75
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def mix_bicubic(grid: NDArray[np.float64], y: float, x: float) -> float:
    total = 0.0
    for r in range(-2, grid.shape[0] + 2):
        for c in range(-2, grid.shape[1] + 2):
            value = grid[min(max(r, 0), grid.shape[0] - 1), min(max(c, 0), grid.shape[1] - 1)]
            total += keys_weight(y - (r + 0.5)) * keys_weight(x - (c + 0.5)) * value
    return min(max(total, float(grid.min())), float(grid.max()))


# ---- from the grid to the photo ---------------------------------------------------------------------------------------------------


@windows
@pytest.mark.parametrize(
    ("interpolation", "mix"),
    [("bilinear", mix_bilinear), ("nearest", mix_nearest), ("bicubic", mix_bicubic)],
    ids=["bilinear", "nearest", "bicubic"],
)
def test_every_pixel_is_mixed_from_the_cells_around_its_centre(
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
def test_whole_photo_is_what_opencv_and_torch_give(photo: tuple[int, int]) -> None:
    attention_map = random_map(6, 9)
    heat = attention_map.to_heatmap(Geometry(photo, (96, 144), Box(0, 0, *photo))).values
    by_torch = torch.nn.functional.interpolate(attention_map.values[None, None], photo, mode="bilinear", align_corners=False)
    np.testing.assert_allclose(heat, by_torch[0, 0].numpy(), atol=1e-6)
    by_opencv = cv2.resize(attention_map.values.numpy(), photo[::-1], interpolation=cv2.INTER_LINEAR)
    np.testing.assert_allclose(heat, by_opencv, atol=2e-5)


@pytest.mark.parametrize("photo", [(60, 91), (91, 60), (33, 33)], ids=["landscape", "portrait", "square"])
def test_whole_photo_bicubic_is_what_torch_gives_clipped(photo: tuple[int, int]) -> None:
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


def test_every_panel_of_a_map_is_brought_to_pixels_alike() -> None:
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
    centre = (rows * heat).sum() / heat.sum(), (columns * heat).sum() / heat.sum()
    patch_height, patch_width = geometry.window.height / 4, geometry.window.width / 6
    assert centre[0] == pytest.approx(geometry.window.top + patch_height / 2, abs=0.3 * patch_height)
    assert centre[1] == pytest.approx(geometry.window.right - patch_width / 2, abs=0.3 * patch_width)


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


def test_rest_of_the_input_that_makes_no_patch_is_not_covered() -> None:
    """230 pixels by patches of 16: 14 patches, 6 pixels that the model never sees."""
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


def test_strip_of_which_nothing_was_seen_gives_an_empty_seen_box() -> None:
    """The centre crop of a photo one pixel wide may fall between two pixel centres."""
    heat = random_map().to_heatmap(Geometry((1, 1000), (32, 48), Box(0.05, 499.6, 0.95, 500.4)))
    assert heat.seen.width == 0
    assert not heat.values.any()


def test_values_of_the_map_are_not_modified() -> None:
    attention_map = random_map()
    before = attention_map.values.clone()
    heat = normalize(attention_map.to_heatmap(WINDOWS["crop"]))
    heat.values[:] = 5
    assert torch.equal(attention_map.values, before)


def test_half_precision_map_with_gradient_is_taken() -> None:
    attention_map = make_map(torch.tensor([[0.0, 0.5, 1.0]]).bfloat16().requires_grad_())
    heat = attention_map.to_heatmap(Geometry((1, 3), (16, 48), Box(0, 0, 1, 3)))
    assert heat.values.tolist() == [[0.0, 0.5, 1.0]]


def test_heatmap_records_geometry_and_interpolation() -> None:
    heat = random_map().to_heatmap(WINDOWS["crop"], "nearest")
    assert heat.provenance.geometry == WINDOWS["crop"]
    assert heat.provenance.parameters == {"interpolation": "nearest"}


def test_marks_are_the_centres_of_the_sinks_patches() -> None:
    sinks = ((Sink(0, 2, 30.0, "blocks.1"), Sink(1, 0, 9.0, "blocks.1")),)
    heat = make_map(torch.rand(2, 3), sinks=sinks).to_heatmap(Geometry((20, 60), (32, 48), Box(0, 0, 20, 60)))
    assert heat.marks == ((5, 50), (15, 10))


@pytest.mark.parametrize(
    ("attention_map", "geometry", "message"),
    [
        pytest.param(
            random_map(2, 3, 1, axes=("batch",)), WINDOWS["crop"], r"of one photo. Choose one image.*at\(batch=0\)", id="batch"
        ),
        pytest.param(
            random_map(), Geometry((9, 9), (16, 16), Box(0, 0, 9, 9)), r"covers 32 x 48 input pixels", id="map of a larger input"
        ),
        pytest.param(
            random_map(), Geometry((9, 9), (96, 96), Box(0, 0, 9, 9)), r"covers 32 x 48 input pixels", id="map of a smaller input"
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


# ---- the record -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_value_that_is_not_finite_is_refused_and_counted(bad: float) -> None:
    values = torch.ones(2, 3)
    values[0, 1] = values[1, 2] = bad
    with pytest.raises(MapError, match="2 of 6 map values are NaN or infinite"):
        make_map(values)


@pytest.mark.parametrize(("shape", "axes"), [((2, 3), ("head",)), ((4, 2, 3), ()), ((4, 3, 2), ("head",)), ((3, 2), ())], ids=str)
def test_values_that_are_not_axes_and_grid_are_refused(shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    layout = TokenLayout("tokens", (), (2, 3), Box(0, 0, 32, 48))
    with pytest.raises(ShapeError, match=r"values must be .* grid \(2, 3\), got"):
        AttentionMap(torch.zeros(shape), axes, layout, {}, "attention")


@pytest.fixture
def panels() -> AttentionMap:
    return make_map(
        torch.arange(2 * 3 * 2 * 3.0).reshape(2, 3, 2, 3),
        ("layer", "head"),
        labels={"layer": ("blocks.0", "blocks.1"), "head": ("a", "b", "c")},
    )


def test_at_takes_one_entry_of_each_named_axis(panels: AttentionMap) -> None:
    one = panels.at(head=1, layer=0)
    assert one.axes == ()
    assert one.values.tolist() == [[6, 7, 8], [9, 10, 11]]


def test_at_keeps_the_other_axis_and_its_labels(panels: AttentionMap) -> None:
    one = panels.at(layer=-1)
    assert one.axes == ("head",)
    assert one.labels == {"head": ("a", "b", "c")}
    assert one.values[0].tolist() == [[18, 19, 20], [21, 22, 23]]


def test_at_of_a_batch_keeps_the_sinks_of_that_image() -> None:
    sinks = ((Sink(0, 0, 9.0, "a"),), (Sink(1, 2, 8.0, "b"),))
    one = make_map(torch.rand(2, 2, 3), ("batch",), sinks=sinks).at(batch=1)
    assert one.facts.sinks == one.provenance.sinks == (sinks[1],)
    assert any("1 token" in text or "sink" in text for text in one.provenance.warnings)


def test_at_of_a_batch_says_nothing_of_sinks_that_were_taken_out() -> None:
    batch = make_map(torch.rand(2, 2, 3), ("batch",), sinks=((Sink(0, 0, 9.0, "a"),), ()))
    taken = replace(batch, facts=replace(batch.facts, sinks_kept=False)).at(batch=0)
    assert taken.provenance.sinks == batch.facts.sinks[:1]
    assert taken.provenance.warnings == ()


def test_at_of_a_batch_keeps_the_glimpses_of_that_image() -> None:
    glimpses = (((Box(0, 0, 4, 4), Box(0, 0, 8, 8)),), ((Box(2, 6, 6, 10), Box(0, 4, 8, 12)),))
    batch = replace(make_map(torch.rand(2, 2, 3), ("batch",)), facts=MapFacts(glimpses=glimpses))
    one = batch.at(batch=1)
    assert one.facts.glimpses == (glimpses[1],)
    assert one.provenance.parameters == {"path": [[8.0, 4.0]], "patches": [[4.0, 4.0], [8.0, 8.0]]}


def test_mean_is_over_the_named_axis_and_is_recorded(panels: AttentionMap) -> None:
    mean = panels.mean("head")
    assert mean.axes == ("layer",)
    assert mean.values[0].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert mean.provenance.parameters == {"mean over head": 3}
    assert panels.provenance.parameters == {}


@pytest.mark.parametrize("index", [3, -4, 99])
def test_at_outside_the_axis_is_refused(panels: AttentionMap, index: int) -> None:
    with pytest.raises(OptionError, match=rf"head must lie in \[-3, 2\], got {index}"):
        panels.at(head=index)


def test_at_of_an_unknown_axis_is_refused_with_the_known_ones(panels: AttentionMap) -> None:
    with pytest.raises(OptionError, match=r"unknown axis 'heads'; did you mean 'head'\? Known: layer, head"):
        panels.at(heads=0)


def test_heatmap_at_takes_values_grid_and_labels_along(panels: AttentionMap) -> None:
    heat = panels.to_heatmap(WINDOWS["crop"])
    one = heat.at(head=2)
    assert one.axes == ("layer",)
    assert one.labels == {"layer": ("blocks.0", "blocks.1")}
    assert np.array_equal(one.values, heat.values[:, 2])
    assert np.array_equal(one.grid, heat.grid[:, 2])


def test_heatmap_at_outside_the_axis_is_refused(panels: AttentionMap) -> None:
    with pytest.raises(OptionError, match=r"layer must lie in \[-2, 1\], got 2"):
        panels.to_heatmap(WINDOWS["crop"]).at(layer=2)


# ---- the mass mask ----------------------------------------------------------------------------------------------------------------


def dino_mask(values: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """visualize_attention.py of DINO: sort, divide by the sum, keep where the running sum exceeds 1 - share."""
    cells = [(float(values[r, c]), r, c) for r in range(values.shape[0]) for c in range(values.shape[1])]
    total = sum(value for value, _, _ in cells)
    mask, running = np.zeros(values.shape), 0.0
    for value, r, c in sorted(cells):
        running += value / total
        mask[r, c] = 1.0 if running > 1 - share else 0.0
    return mask


@pytest.mark.parametrize("share", [0.05, 0.5, 0.6, 0.95])
@pytest.mark.parametrize("seed", range(3))
def test_mass_is_the_mask_of_dino(seed: int, share: float) -> None:
    values = np.random.default_rng(seed).random((5, 7)) ** 4
    assert np.array_equal(make_map(values).mass(share).values.numpy(), dino_mask(values, share))


@quick
@given(st.lists(st.floats(0.01, 1), min_size=6, max_size=6), st.floats(0.01, 0.99))
def test_mass_is_the_smallest_set_that_holds_the_share(values: list[float], share: float) -> None:
    """All 64 subsets of a 2 x 3 grid are tried."""
    mask = make_map(torch.tensor(values, dtype=torch.float64).view(2, 3)).mass(share).values.flatten().tolist()
    need = share * sum(values) - 1e-9
    enough = [len(chosen) for n in range(7) for chosen in itertools.combinations(values, n) if sum(chosen) >= need]
    assert sum(mask) == min(enough)
    assert sum(value for value, kept in zip(values, mask, strict=True) if kept) >= need


@pytest.mark.parametrize(("share", "cells"), [(0.1, 1), (0.3, 3), (0.6, 6), (0.7, 7), (0.9, 9), (1.0, 10)])
def test_mass_of_ten_equal_cells_is_a_tenth_each(share: float, cells: int) -> None:
    assert make_map(torch.full((2, 5), 0.1)).mass(share).values.sum() == cells


def test_mass_0_keeps_nothing() -> None:
    assert not random_map().mass(0).values.any()


def test_mass_1_keeps_every_cell_that_has_any() -> None:
    assert make_map([[0.0, 0.1, 0.2], [0.0, 5.0, 1e-6]]).mass(1).values.tolist() == [[0, 1, 1], [0, 1, 1]]


def test_mass_is_taken_panel_by_panel() -> None:
    attention_map = random_map(2, 3, 4, axes=("head",))
    assert torch.equal(attention_map.mass(0.5).values[2], attention_map.at(head=2).mass(0.5).values)


def test_mass_is_of_meaning_mask_and_recorded() -> None:
    mask = random_map().mass(0.7)
    assert (mask.meaning, mask.provenance.parameters) == ("mask", {"mass": 0.7})


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_mass_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(OptionError, match="mass must be a number from 0 to 1"):
        random_map().mass(share)


@pytest.mark.parametrize(
    "values", [[[0.5, -0.1]], [[0.0, 0.0]], [[[1.0, 1.0]], [[0.0, 0.0]]]], ids=["negative", "zero", "one zero panel"]
)
def test_mass_of_a_map_without_mass_is_refused(values: list[Any]) -> None:
    with pytest.raises(MapError, match="needs non-negative values with a positive sum"):
        make_map(values, ("head",) if isinstance(values[0][0], list) else ()).mass()


# ---- normalisation ----------------------------------------------------------------------------------------------------------------


def heat_of(grid: Any, axes: tuple[str, ...] = (), *, signed: bool = False) -> Heatmap:
    """One pixel for each cell."""
    tensor = torch.as_tensor(grid, dtype=torch.float32)
    rows, columns = tensor.shape[-2:]
    return replace(make_map(tensor, axes), signed=signed).to_heatmap(
        Geometry((rows, columns), (16 * rows, 16 * columns), Box(0, 0, rows, columns))
    )


GRID = [[-2.0, -1.0, 0.0], [1.0, 3.0, 4.0]]
RAISED = [[value + 2 for value in row] for row in GRID]


def scaled(values: list[list[float]], low: float, high: float) -> list[list[float]]:
    return [[min(max((value - low) / (high - low), 0.0), 1.0) for value in row] for row in values]


@pytest.mark.parametrize(
    ("how", "grid", "signed", "low", "high"),
    [
        ("auto", GRID, False, -4, 4),  # there are values below zero, so zero is one of its own
        ("auto", GRID, True, -4, 4),
        ("auto", RAISED, False, 0, 6),
        ("auto", RAISED, True, -6, 6),
        ("minmax", GRID, False, -2, 4),
        ("minmax", GRID, True, -2, 4),
        ("minmax", RAISED, False, 0, 6),
        ("symmetric", GRID, False, -4, 4),
        ("symmetric", RAISED, False, -6, 6),
        ("percentile", GRID, True, -3.95, 3.95),  # 99 hundredths of the way through 6 sorted sizes
        ("percentile", RAISED, False, 0.05, 5.95),  # 1 and 99 hundredths of the way through 6 sorted values
    ],
)
def test_normalization_does_what_its_name_says(
    how: Literal["auto", "minmax", "symmetric", "percentile"], grid: list[list[float]], signed: bool, low: float, high: float
) -> None:
    heat = normalize(heat_of(grid, signed=signed), how)
    np.testing.assert_allclose(heat.values, scaled(grid, low, high), atol=1e-6)
    np.testing.assert_allclose(heat.grid, scaled(grid, low, high), atol=1e-6)
    assert heat.provenance.value_range == pytest.approx((low, high))


def test_normalization_none_leaves_values_alone() -> None:
    values = [[0.1, 0.2, 0.3], [0.25, 0.5, 0.9]]
    heat = normalize(heat_of(values), "none")
    np.testing.assert_allclose(heat.values, values, atol=1e-7)
    assert heat.provenance.value_range == (0, 1)


@pytest.mark.parametrize("values", [[[0.0, 1.01]], [[-0.01, 1.0]]], ids=["above", "below"])
def test_normalization_none_refuses_values_outside_0_to_1(values: list[list[float]]) -> None:
    with pytest.raises(MapError, match=r"normalize='none' takes values in \[0, 1\], got"):
        normalize(heat_of(values), "none")


def test_unknown_normalization_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown normalization 'min-max'; did you mean 'minmax'"):
        normalize(heat_of(GRID), "min-max")  # type: ignore[arg-type]


PANELS = [[[[0.0, 1.0]], [[2.0, 4.0]]], [[[-6.0, 8.0]], [[1.0, 3.0]]]]  # layer, head, 1 x 2 grid


@pytest.mark.parametrize(
    ("shared", "ranges"),
    [
        pytest.param((), [[(0, 1), (2, 4)], [(-6, 8), (1, 3)]], id="each panel"),
        pytest.param(("head",), [[(0, 4), (0, 4)], [(-6, 8), (-6, 8)]], id="over heads"),
        pytest.param(("layer",), [[(-6, 8), (1, 4)], [(-6, 8), (1, 4)]], id="over layers"),
        pytest.param(("layer", "head"), [[(-6, 8), (-6, 8)], [(-6, 8), (-6, 8)]], id="over all"),
    ],
)
@pytest.mark.parametrize(("layer", "head"), list(itertools.product((0, 1), (0, 1))))
def test_shared_axes_have_one_scale(
    shared: tuple[str, ...], ranges: list[list[tuple[float, float]]], layer: int, head: int
) -> None:
    heat = normalize(heat_of(PANELS, ("layer", "head")), "minmax", shared)
    np.testing.assert_allclose(heat.values[layer, head], scaled(PANELS[layer][head], *ranges[layer][head]), atol=1e-6)


@pytest.mark.parametrize(
    ("shared", "text"),
    [((), "minmax"), (("head",), "minmax, one scale over head"), (("layer", "head"), "minmax, one scale over layer and head")],
)
def test_normalization_is_written_into_the_provenance(shared: tuple[str, ...], text: str) -> None:
    heat = normalize(heat_of(PANELS, ("layer", "head")), "minmax", shared)
    assert heat.provenance.normalization == text
    assert heat.provenance.value_range == (-6, 8)


def test_unknown_shared_axis_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown axis 'heads'; did you mean 'head'"):
        normalize(heat_of(PANELS, ("layer", "head")), shared=("heads",))


@pytest.mark.parametrize("meaning", ["attention", "cosine similarity"])
def test_normalized_unseen_pixels_are_zero(meaning: str) -> None:
    attention_map = make_map(torch.tensor([[-1.0, 2.0, 3.0]]), meaning=meaning)
    heat = normalize(attention_map.to_heatmap(Geometry((16, 80), (16, 48), Box(0, 16, 16, 64))))
    assert not heat.values[:, :16].any()
    assert not heat.values[:, 64:].any()


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, 1e-45], ids=["0", "1", "1e-30", "denormal"])
def test_constant_map_normalizes_to_zeros(value: float) -> None:
    raw = make_map(torch.full((2, 3), value)).to_heatmap(WINDOWS["crop"])
    heat = normalize(raw)
    assert not heat.values.any()
    assert not heat.grid.any()
    assert heat.provenance.value_range == (raw.grid[0, 0], raw.grid[0, 0])


@quick
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=6, max_size=6))
def test_normalized_values_fill_0_to_1(values: list[float]) -> None:
    heat = normalize(heat_of(torch.tensor(values).view(2, 3)), "minmax")
    constant = bool((heat_of(torch.tensor(values).view(2, 3)).grid == values[0]).all())
    assert np.isfinite(heat.values).all()
    assert heat.grid.min() == 0
    assert heat.grid.max() == (0 if constant else 1)
    assert 0 <= heat.values.min() <= heat.values.max() <= 1


@quick
@given(
    st.lists(st.integers(-50, 50), min_size=6, max_size=6),
    st.integers(1, 20),
    st.integers(-100, 100),
    st.sampled_from(["minmax", "percentile"]),
)
def test_normalized_values_do_not_change_under_a_rising_line(
    values: list[int], factor: int, offset: int, how: Literal["minmax", "percentile"]
) -> None:
    def unit(grid: Any) -> Any:
        low, high = value_range(grid, how)
        return ((grid - low) / (high - low)).clip(0, 1) if high > low else grid * 0

    grid = np.array(values, np.float32)
    np.testing.assert_allclose(unit(grid), unit(grid * factor + offset), atol=1e-4)


def test_percentile_of_a_single_outlier_still_shows_it() -> None:
    """Both percentiles fall on the background; a map that has a peak must not count as constant."""
    grid = np.zeros((20, 20), np.float32)
    grid[3, 4] = 1
    low, high = value_range(grid, "percentile")
    assert low < high


# ---- files ------------------------------------------------------------------------------------------------------------------------


def saved_map() -> tuple[AttentionMap, Geometry]:
    provenance = Provenance(
        model="vit",
        method="rollout",
        parameters={"fusion": "mean", "discard": 0.9},
        sinks=((Sink(1, 2, 12.5, "blocks.0"),),),
        notes=("a note",),
        versions={"torch": "2"},
    )
    attention_map = make_map(
        torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(1)),
        ("head",),
        labels={"head": ("a", "b", "c", "d")},
        meaning="rollout",
        provenance=provenance,
    )
    return attention_map, WINDOWS["crop"]


def loaded(path: Path) -> tuple[AttentionMap, Geometry]:
    found = load_map(path)
    assert isinstance(found, tuple)
    return found


def test_saved_map_comes_back_whole(tmp_path: Path) -> None:
    attention_map, geometry = saved_map()
    path = tmp_path / "map.npz"
    path.write_bytes(save_map(attention_map, geometry))
    back, place = loaded(path)
    assert torch.equal(back.values, attention_map.values)
    assert (back.axes, back.layout, back.labels, back.meaning) == (
        attention_map.axes,
        attention_map.layout,
        attention_map.labels,
        attention_map.meaning,
    )
    assert back.provenance == replace(attention_map.provenance, geometry=geometry)
    assert place == geometry


def test_saved_loaded_and_saved_map_has_equal_bytes(tmp_path: Path) -> None:
    path = tmp_path / "map.npz"
    path.write_bytes(save_map(*saved_map()))
    assert save_map(*loaded(path)) == path.read_bytes()


def test_map_with_gradient_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "map.npz"
    path.write_bytes(save_map(make_map(torch.ones(2, 3).requires_grad_()), WINDOWS["crop"]))
    assert loaded(path)[0].values.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_map_with_a_name_that_is_not_utf_8_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"bad\xff.npz")
    path.write_bytes(save_map(*saved_map()))
    assert loaded(path)[1] == WINDOWS["crop"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint8", "int64", "bool", ">f4"])
def test_plain_array_is_loaded_as_float32(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "plain.npy", np.array([[0, 1, 1], [1, 0, 0]], dtype))
    found = load_map(tmp_path / "plain.npy")
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    assert found.tolist() == [[0, 1, 1], [1, 0, 0]]


class Payload:
    """Leaves a file behind if it is ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_pickled_array_is_refused_and_not_run(kind: str, tmp_path: Path) -> None:
    hostile = np.array([[Payload(tmp_path / "run")]], dtype=object)
    path = tmp_path / f"hostile.{kind}"
    if kind == "npy":
        np.save(path, hostile, allow_pickle=True)
    else:
        np.savez(path, values=hostile, facts=hostile)
    with pytest.raises(MapError, match=rf"hostile\.{kind}: not a map"):
        load_map(path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 3, 4)), np.array([["a", "b"]])], ids=["row", "volume", "text"])
def test_array_that_is_no_map_is_refused(array: NDArray[Any], tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", array)
    with pytest.raises(MapError, match=r"array\.npy: not a map \(a map must be an array \(rows, columns\) of numbers"):
        load_map(tmp_path / "array.npy")


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"<html></html>", b"\x80\x04K\x01.", b"PK\x03\x04"], ids=["empty", "text", "html", "pickle", "zip"]
)
def test_file_that_is_no_map_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.npz").write_bytes(content)
    with pytest.raises(MapError, match=r"file\.npz: not a map"):
        load_map(tmp_path / "file.npz")


def test_missing_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MapError, match=r"gone\.npz: "):
        load_map(tmp_path / "gone.npz")


def test_map_without_geometry_is_refused(tmp_path: Path) -> None:
    whole = np.load(io.BytesIO(save_map(*saved_map())))
    text = str(whole["facts"])
    start = text.index('"geometry": ')
    end = text.index("}", start) + 1
    np.savez(tmp_path / "map.npz", values=whole["values"], facts=np.array(text[:start] + '"geometry": null' + text[end:]))
    with pytest.raises(MapError, match="has no geometry"):
        load_map(tmp_path / "map.npz")


@pytest.mark.parametrize("facts", ["[]", "3", '"x"', "{}", "{", '{"provenance": 3}', "null"])
def test_map_with_wrong_facts_is_refused(facts: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "map.npz", values=np.zeros((2, 3), np.float32), facts=np.array(facts))
    with pytest.raises(MapError, match=r"map\.npz: not a map"):
        load_map(tmp_path / "map.npz")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param('"labels": {"head": ["a", "b", "c", "d"]}', '"labels": ["head"]', id="labels are a list"),
        pytest.param('"axes": ["head"]', '"axes": []', id="axis missing"),
        pytest.param('"grid": [2, 3]', '"grid": [3, 2]', id="other grid"),
        pytest.param('"grid": [2, 3]', '"grid": 6', id="grid is a number"),
        pytest.param('"box": [0, 0, 32, 48]', '"box": [0, 0]', id="box cut"),
        pytest.param('"meaning": "rollout"', '"maening": "rollout"', id="key misspelt"),
        pytest.param('"model": "vit"', '"modle": "vit"', id="unknown fact"),
    ],
)
def test_map_with_one_wrong_fact_is_refused(old: str, new: str, tmp_path: Path) -> None:
    whole = np.load(io.BytesIO(save_map(*saved_map())))
    text = str(whole["facts"])
    assert old in text
    np.savez(tmp_path / "map.npz", values=whole["values"], facts=np.array(text.replace(old, new)))
    with pytest.raises(MapError, match=r"map\.npz: not a map"):
        load_map(tmp_path / "map.npz")


def test_map_with_values_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    whole = np.load(io.BytesIO(save_map(*saved_map())))
    np.savez(tmp_path / "map.npz", values=whole["values"] * np.nan, facts=whole["facts"])
    with pytest.raises(MapError, match="24 of 24 map values are NaN or infinite"):
        load_map(tmp_path / "map.npz")


def test_encrypted_map_is_refused(tmp_path: Path) -> None:
    data = bytearray(save_map(*saved_map()))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        starts = [entry.header_offset for entry in archive.infolist()]
    data[starts[0] + 6] |= 1  # the flag in the local header and in the directory
    directory = data.index(b"PK\x01\x02")
    data[directory + 8] |= 1
    (tmp_path / "map.npz").write_bytes(data)
    with pytest.raises(MapError, match=r"map\.npz: not a map"):
        load_map(tmp_path / "map.npz")


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4), st.floats(0, 1))
def test_damaged_map_is_refused_or_loaded_whole(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[float, int]], kept: float
) -> None:
    attention_map, geometry = saved_map()
    data = bytearray(save_map(attention_map, geometry))
    for place, value in edits:
        data[int(place * len(data))] = value
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(data[: int(len(data) * kept**0.1)])
    try:
        back, _ = loaded(path)
    except MapError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert torch.equal(back.values, attention_map.values)  # the archive's own checksum holds
    assert not refusal or ("damaged.npz: " in refusal and refusal.isprintable())


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_map_without_a_cell_is_refused(shape: tuple[int, int]) -> None:
    layout = TokenLayout("tokens", (), shape, Box(0, 0, 32, 48))
    with pytest.raises(ShapeError, match=r"a map must have a cell at least, got the grid \((0, 4|4, 0)\)"):
        AttentionMap(torch.zeros(shape), (), layout, {}, "attention")


def test_a_heatmap_without_panels_has_no_scale() -> None:
    heat = make_map(torch.zeros(0, 2, 3), ("head",)).to_heatmap(Geometry((32, 48), (32, 48), Box(0, 0, 32, 48)))
    with pytest.raises(MapError, match=r"a heatmap without values has no scale, got \('head',\) \(0, 32, 48\)"):
        normalize(heat)


def test_a_span_beyond_float32_is_scaled() -> None:
    heat = make_map([[3e38, -3e38, 0.0]]).to_heatmap(Geometry((16, 48), (16, 48), Box(0, 0, 16, 48)), "nearest")
    assert np.allclose(normalize(heat).values[0, [0, 20, 40]], [1, 0, 0.5])
