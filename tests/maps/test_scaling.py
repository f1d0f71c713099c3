"""Normalization of heatmaps, compared with hand calculation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from tests.maps.making import WINDOWS, make_map, quick
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import Heatmap, normalize, value_range
from visattn.core.maps.scaling import resolved
from visattn.errors import MapError, OptionError


def heat_of(grid: Any, axes: tuple[str, ...] = (), *, signed: bool = False) -> Heatmap:
    """Build a heatmap with one pixel per cell."""
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
        ("auto", GRID, False, -4, 4),  # negative values make the scale symmetric
        ("auto", GRID, True, -4, 4),
        ("auto", RAISED, False, 0, 6),
        ("auto", RAISED, True, -6, 6),
        ("minmax", GRID, False, -2, 4),
        ("minmax", GRID, True, -2, 4),
        ("minmax", RAISED, False, 0, 6),
        ("symmetric", GRID, False, -4, 4),
        ("symmetric", RAISED, False, -6, 6),
        ("percentile", GRID, True, -3.95, 3.95),  # 99th percentile of 6 sorted magnitudes
        ("percentile", RAISED, False, 0.05, 5.95),  # 1st and 99th percentile of 6 sorted values
    ],
)
def test_normalization_equals_its_formula(
    how: Literal["auto", "minmax", "symmetric", "percentile"], grid: list[list[float]], signed: bool, low: float, high: float
) -> None:
    heat = normalize(heat_of(grid, signed=signed), how)
    np.testing.assert_allclose(heat.values, scaled(grid, low, high), atol=1e-6)
    np.testing.assert_allclose(heat.grid, scaled(grid, low, high), atol=1e-6)
    assert heat.provenance.value_range == pytest.approx((low, high))


def test_normalization_none_does_not_change_values() -> None:
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
        normalize(heat_of(PANELS, ("layer", "head")), shared_axes=("heads",))


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
def test_normalization_is_invariant_to_positive_scale_and_offset(
    values: list[int], factor: int, offset: int, how: Literal["minmax", "percentile"]
) -> None:
    def unit(grid: Any) -> Any:
        low, high = value_range(grid, how)
        return ((grid - low) / (high - low)).clip(0, 1) if high > low else grid * 0

    grid = np.array(values, np.float32)
    np.testing.assert_allclose(unit(grid), unit(grid * factor + offset), atol=1e-4)


def test_percentile_of_a_single_outlier_still_shows_it() -> None:
    """Check that a map with one peak does not count as constant, though both percentiles lie on the background."""
    grid = np.zeros((20, 20), np.float32)
    grid[3, 4] = 1
    low, high = value_range(grid, "percentile")
    assert low < high


def with_peaks(count: int, height: float) -> NDArray[np.float32]:
    """Return an even ramp from 0 to 1 on 20 x 20 cells, of which `count` are raised to `height`."""
    values = np.linspace(0, 1, 400, dtype=np.float32)
    values[:count] = height
    return values.reshape(20, 20)


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (with_peaks(0, 1), "minmax"),
        (with_peaks(3, 5), "percentile"),  # three cells hide 397 others
        (with_peaks(1, 1.2), "minmax"),  # they hide little
        (with_peaks(3, 500), "minmax"),  # they hold most of the sum
        (np.eye(1, 400, dtype=np.float32).reshape(20, 20), "minmax"),
        (np.full((20, 20), 2.0, np.float32), "minmax"),
    ],
    ids=["even", "sparse", "a low peak", "a map of three cells", "one cell", "constant"],
)
def test_auto_is_percentile_only_where_few_cells_hide_the_rest(grid: NDArray[np.float32], expected: str) -> None:
    assert resolved("auto", grid) == expected
    assert value_range(grid, "auto") == value_range(grid, expected)
    holed = grid.copy()
    holed[-1, -1] = np.nan
    assert resolved("auto", holed) == expected
    assert resolved("auto", grid, signed=True) == "symmetric"
    assert resolved("none", grid) == "none"
