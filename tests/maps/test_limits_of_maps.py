"""Limits of maps: weights of interpolation, ends of scales and shares of cells, with values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.maps.making import make_map
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, Heatmap, MapFacts, interpolation, scaling
from visattn.core.maps.scaling import nearly_even, normalize, range_words, resolved, shows_nothing, value_range, within
from visattn.core.provenance import Provenance, Sink
from visattn.core.records import TokenLayout
from visattn.errors import MapError, OptionError, ShapeError

PLACE = Geometry((6, 20), (4, 10), Box(1, 2, 5, 17))  # 1 photo pixel per row of the input, 1.5 per column


def heat_of(grid: Any, axes: tuple[str, ...] = (), **changes: Any) -> Heatmap:
    values = np.asarray(grid, np.float32)
    rows, columns = values.shape[-2:]
    made = Heatmap(values.copy(), axes, Box(0, 0, rows, columns), "attention", Provenance(versions={}), values.copy())
    return replace(made, **changes)


# ---- interpolation ----------------------------------------------------------------------------------------------------------------


def test_weights_of_rows_and_columns_follow_their_own_sides() -> None:
    box = Box(1, 2, 3, 8)  # two rows and six columns of the input
    down = interpolation._weights(PLACE, box, 2, range(2, 4), 0, "bilinear")
    across = interpolation._weights(PLACE, box, 3, range(5, 14), 1, "bilinear")
    assert down.tolist() == [[1, 0], [0, 1]]
    places = [(pixel + 0.5 - 2) / 1.5 for pixel in range(5, 14)]  # input pixels; cells of 2 have their centers at 3, 5 and 7
    expected = [[max(0, 1 - abs(min(max(at, 3), 7) - center) / 2) for center in (3, 5, 7)] for at in places]
    assert np.abs(across - expected).max() < 1e-6
    assert across.dtype == np.float32


def test_nearest_cell_is_the_one_that_covers_the_pixel() -> None:
    assert interpolation._weights(PLACE, Box(0, 0, 4, 10), 2, range(1, 5), 0, "nearest").tolist() == [
        [1, 0],
        [1, 0],
        [0, 1],
        [0, 1],
    ]


@pytest.mark.parametrize(
    ("position", "taps"),
    [
        (2.5, {1: 0, 2: 1, 3: 0, 4: 0}),
        (3.0, {1: -0.09375, 2: 0.59375, 3: 0.59375, 4: -0.09375}),
        (2.75, {1: -0.10546875, 2: 0.87890625, 3: 0.26171875, 4: -0.03515625}),
        (3.25, {1: -0.03515625, 2: 0.26171875, 3: 0.87890625, 4: -0.10546875}),
    ],
)
def test_cubic_weights_are_those_of_keys(position: float, taps: dict[int, float]) -> None:
    found = {int(cell[0]): float(weight[0]) for cell, weight in interpolation._bicubic(np.array([position]))}
    assert found == pytest.approx(taps)


def test_linear_weights_fall_with_the_distance() -> None:
    found = [(int(cell[0]), float(weight[0])) for cell, weight in interpolation._bilinear(np.array([2.75]))]
    assert found == [(2, 0.75), (3, 0.25)]


@pytest.mark.parametrize("how", ["nearest", "bilinear", "bicubic"])
def test_pixels_beside_a_hole_are_means_of_the_other_cells(how: Any) -> None:
    grid = np.array([[2, np.nan, 6], [2, 2, 6]], np.float32)
    place = Geometry((20, 30), (2, 3), Box(0, 0, 20, 30))
    found = interpolation.resampled(grid, place, Box(0, 0, 2, 3), Box(0, 0, 20, 30), how)
    assert np.isnan(found[:10, 10:20]).all()
    assert np.isnan(found).sum() == 100
    assert np.abs(found[:, :5] - 2).max() < 1e-6
    assert np.abs(found[:5, 20:] - 6).max() < (0.06 if how == "bicubic" else 1e-6)
    assert np.nanmin(found) >= 2
    assert np.nanmax(found) <= 6


@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
def test_no_pixel_lies_beyond_the_cells_of_its_own_grid(how: Any) -> None:
    grid = np.array([[[0, 0, 8, 8]], [[1, 1, 2, 2]]], np.float32)
    place = Geometry((1, 40), (1, 4), Box(0, 0, 1, 40))
    found = interpolation.resampled(grid, place, Box(0, 0, 1, 4), Box(0, 0, 1, 40), how)
    assert found.max((1, 2)).tolist() == [8, 2]
    assert found.min((1, 2)).tolist() == [0, 1]


# ---- scaling ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "even"),
    [
        (0.951, 1, True),
        (0.9499, 1, False),
        (-1, -0.951, True),
        (-1, -0.94, False),
        (0, 0, False),
        (0, 1e-9, False),
        (-0.01, 0.01, False),
        (19, 20, True),
    ],
)
def test_values_of_one_sign_within_a_twentieth_are_nearly_even(low: float, high: float, even: bool) -> None:
    assert nearly_even(low, high) is even
    assert shows_nothing("auto", low, high) is (even or low == high)
    assert shows_nothing("minmax", low, high) is (low == high)


def test_a_scale_that_ends_below_its_start_shows_nothing() -> None:
    assert shows_nothing("minmax", 2, 1)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.5, 0.75, "0.5 to 0.75"),
        (0.505, 0.507, "0.505 to 0.507"),
        (1.00001, 1.00002, "1.00001 to 1.00002"),
        (1, 1 + 1e-9, "1 to 1"),
        (0.123456, 0.5, "0.12 to 0.5"),
    ],
)
def test_ends_have_as_many_digits_as_tell_them_apart(low: float, high: float, said: str) -> None:
    assert range_words(low, high) == said


def test_seven_digits_are_the_most() -> None:
    assert range_words(1.0000001, 1.0000002) == "1 to 1"
    assert range_words(1.000001, 1.000002) == "1.000001 to 1.000002"


@pytest.mark.parametrize(
    ("mode", "signed", "ends"),
    [
        ("minmax", False, (-3, 5)),
        ("minmax", True, (-3, 5)),
        ("symmetric", False, (-5, 5)),
        ("auto", True, (-5, 5)),
        ("auto", False, (-3, 5)),
        ("percentile", False, (-2.92, 4.92)),
        ("percentile", True, (-4.92, 4.92)),
    ],
)
def test_ends_of_scales(mode: Any, signed: bool, ends: tuple[float, float]) -> None:
    assert value_range(np.linspace(-3, 5, 401, dtype=np.float32), mode, signed) == pytest.approx(ends, abs=0.021)


def test_percentiles_of_magnitudes_that_are_mostly_zero_are_the_largest() -> None:
    grid = np.zeros(400, np.float32)
    grid[7] = -3
    assert value_range(grid, "percentile", signed=True) == (-3, 3)
    assert value_range(grid, "percentile") == (-3, 0)


@pytest.mark.parametrize(("values", "fine"), [([0, 1], True), ([0.2, 0.4], True), ([-0.001, 1], False), ([0, 1.001], False)])
def test_unscaled_values_lie_in_0_to_1(values: list[float], fine: bool) -> None:
    grid = np.array(values, np.float32)
    if fine:
        assert value_range(grid, "none") == (0, 1)
        return
    with pytest.raises(MapError, match=r"takes values in \[0, 1\]"):
        value_range(grid, "none")


def test_holes_alone_have_no_range_and_other_holes_are_ignored() -> None:
    with pytest.raises(MapError, match="got holes alone"):
        value_range(np.array([np.nan], np.float32), "minmax", holes=True)
    assert value_range(np.array([np.nan, 2, 5], np.float32), "minmax", holes=True) == (2, 5)
    with pytest.raises(MapError, match="1 of 3 map values are NaN or infinite"):
        value_range(np.array([np.nan, 2, 5], np.float32), "minmax")


def test_a_grid_of_holes_has_the_plain_scale() -> None:
    assert resolved("auto", np.array([np.nan, np.nan], np.float32)) == "minmax"
    assert resolved("percentile", np.array([1.0], np.float32)) == "percentile"
    assert resolved("none", np.array([1.0], np.float32), signed=True) == "none"
    assert scaling.names_of("auto", [np.array([1, 2], np.float32)] * 2, signed=True) == "symmetric"


@pytest.mark.parametrize(("peak", "mode"), [(1.30, "minmax"), (1.34, "percentile"), (20, "percentile"), (26, "minmax")])
def test_auto_cuts_a_few_high_cells_that_are_less_than_half_of_the_sum(peak: float, mode: str) -> None:
    """Check 201 even steps from 0 to 1 and two peaks: the 99th percentile is close to 1; the steps add up to 100.5."""
    grid = np.concatenate([np.linspace(0, 1, 201), [peak, peak]]).astype(np.float32)
    if 19 < peak < 30:
        grid[:201] *= 0.5 if peak == 26 else 1
    assert resolved("auto", grid) == mode


def test_entries_of_other_axes_are_scaled_on_their_own() -> None:
    grid = np.array([[[[0, 1, 2]], [[0, 2, 4]], [[0, 3, 6]]], [[[1, 2, 9]], [[2, 3, 4]], [[5, 5, 5]]]], np.float32)
    heat = heat_of(grid, ("layer", "head"))
    own = normalize(heat, "minmax")
    assert own.values[:, :, 0].tolist() == [[[0, 0.5, 1]] * 3, [[0, 0.125, 1], [0, 0.5, 1], [0, 0, 0]]]
    assert [own.provenance.value_range] == [(0.0, 9.0)]
    assert own.provenance.normalization == "minmax"
    one = normalize(heat, "minmax", ("head",))
    assert one.grid[0, 1, 0].tolist() == pytest.approx([0, 2 / 6, 4 / 6])
    assert one.values[1, 1, 0].tolist() == [0.125, 0.25, 0.375]
    assert one.provenance.normalization == "minmax, one scale over head"
    assert own.normalized
    assert not own.signed
    assert normalize(heat, "symmetric").signed
    assert normalize(replace(heat, signed=True), "minmax").signed


def test_a_heatmap_is_raw_and_unmarked_by_default() -> None:
    heat = heat_of([[1, 2]])
    assert (heat.normalized, heat.signed, heat.marks, heat.query, dict(heat.labels)) == (False, False, (), (), {})


def test_a_span_beyond_float32_is_scaled() -> None:
    assert normalize(heat_of([[-3e38, 0, 3e38]]), "minmax").values.tolist() == [[0, 0.5, 1]]
    assert normalize(heat_of([[2e38, 3e38]]), "minmax").values.tolist() == [[0, 1]]


def test_pixels_that_were_not_seen_become_0_and_holes_stay() -> None:
    values = np.full((5, 7), 3, np.float32)
    values[2, 3], values[2, 4] = np.nan, 1
    heat = heat_of(values, seen=Box(1, 2, 4, 6))
    found = normalize(heat, "minmax").values
    expected = np.zeros((5, 7))
    expected[1:4, 2:6] = 1
    expected[2, 4] = 0
    expected[2, 3] = np.nan
    assert np.array_equal(found, expected, equal_nan=True)


def test_values_within_a_scale_are_clipped_to_it() -> None:
    heat = heat_of([[-1, 0, 1], [2, 3, np.nan]])
    assert np.array_equal(within(heat, 0, 2).values, np.array([[0, 0, 0.5], [1, 1, np.nan]]), equal_nan=True)
    assert np.array_equal(within(heat, 1, 3).grid, np.array([[0, 0, 0], [0.5, 1, np.nan]]), equal_nan=True)
    assert np.array_equal(within(heat, 2, 2).values, np.array([[0, 0, 0], [0, 0, np.nan]]), equal_nan=True)
    assert within(heat, 0, 2).provenance.value_range == (0, 2)
    assert within(heat, 0, 2).normalized


# ---- maps -------------------------------------------------------------------------------------------------------------------------


def test_holes_are_nan_in_each_grid_and_other_nans_are_counted() -> None:
    layout = TokenLayout("tokens", (), (2, 3), Box(0, 0, 32, 48), (1, 5))
    made = AttentionMap(torch.arange(24.0).view(2, 2, 2, 3), ("layer", "head"), layout, {}, "attention")
    assert torch.isnan(made.values).nonzero().tolist() == [
        [i, j, *cell] for i in (0, 1) for j in (0, 1) for cell in ((0, 1), (1, 2))
    ]
    values = torch.arange(24.0).view(2, 2, 2, 3)
    values[1, 0, 0, 2] = values[0, 1, 1, 1] = math.nan
    with pytest.raises(MapError, match="2 of 24 map values are NaN or infinite"):
        AttentionMap(values, ("layer", "head"), layout, {}, "attention")


@pytest.mark.parametrize("shape", [(2, 3), (4, 3, 2), (4, 2, 2), (1, 4, 2, 3), (4, 3, 3)])
def test_values_have_the_shape_of_axes_and_grid(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="values must be"):
        AttentionMap(torch.zeros(shape), ("head",), TokenLayout("tokens", (), (2, 3), Box(0, 0, 32, 48)), {}, "attention")


def test_values_below_0_make_a_map_signed_unless_zero_has_no_meaning() -> None:
    layout = TokenLayout("tokens", (), (1, 2), Box(0, 0, 32, 48))
    below, zero = torch.tensor([[-0.5, 1.0]]), torch.tensor([[0.0, 1.0]])
    assert AttentionMap(below, (), layout, {}, "x").signed
    assert not AttentionMap(zero, (), layout, {}, "x").signed
    assert AttentionMap(zero, (), layout, {}, "x", signed=True).signed
    assert not AttentionMap(below, (), layout, {}, "x", facts=MapFacts(interval=True)).signed


@pytest.mark.parametrize("index", [-4, 3])
def test_an_entry_beyond_the_axis_is_refused(index: int) -> None:
    with pytest.raises(OptionError, match=r"head must lie in \[-3, 2\]"):
        make_map(torch.zeros(3, 2, 3), ("head",)).at(head=index)
    with pytest.raises(OptionError, match=r"head must lie in \[-3, 2\]"):
        heat_of(np.zeros((3, 2, 5)), ("head",)).at(head=index)


@pytest.mark.parametrize(("index", "place"), [(-3, 0), (-1, 2), (0, 0), (2, 2)])
def test_the_first_and_the_last_entry_are_taken_from_both_ends(index: int, place: int) -> None:
    values = torch.arange(18.0).view(3, 2, 3)
    found = make_map(values, ("head",), labels={"head": ("a", "7", "c")}).at(head=index)
    assert found.values.tolist() == values[place].tolist()
    assert found.provenance.parameters["head"] == ("a", 7, "c")[place]
    assert make_map(values, ("head",)).at(head=index).provenance.parameters["head"] == place
    assert heat_of(values.numpy(), ("head",)).at(head=index).grid.tolist() == values[place].tolist()


def test_only_an_entry_of_the_axis_of_layers_names_the_layer() -> None:
    labels = {"layer": ("blocks.0", "blocks.1")}
    one = make_map(torch.arange(36.0).view(2, 3, 2, 3), ("layer", "head"), labels=labels)
    one = replace(one, facts=MapFacts(layer="all"))
    assert one.at(layer=1).facts.layer == "blocks.1"
    assert one.at(head=1).facts.layer == "all"
    assert one.at(head=1).axes == ("layer",)
    assert one.at(head=1).labels == labels
    assert one.at(layer=1).labels == {}
    assert one.at(layer=1).provenance.parameters == {"layer": "blocks.1"}
    assert one.mean("head").values.tolist() == one.values.mean(1).tolist()
    assert one.mean("head").provenance.parameters == {"mean over 3 heads": True}


def test_mass_keeps_the_largest_cells_that_hold_the_share() -> None:
    values = torch.tensor([[[5.0, 3.0, 2.0]], [[1.0, 0.0, 3.0]]])
    kept = {share: make_map(values, ("head",)).mass(share).values[:, 0].tolist() for share in (0.5, 0.51, 0.75, 0.8, 0.81, 1)}
    assert kept == {
        0.5: [[1, 0, 0], [0, 0, 1]],
        0.51: [[1, 1, 0], [0, 0, 1]],
        0.75: [[1, 1, 0], [0, 0, 1]],
        0.8: [[1, 1, 0], [1, 0, 1]],
        0.81: [[1, 1, 1], [1, 0, 1]],
        1: [[1, 1, 1], [1, 0, 1]],
    }


@pytest.mark.parametrize(
    ("size", "fits"),
    [((63, 79), True), ((33, 49), True), ((32, 64), False), ((48, 48), False), ((64, 64), False), ((48, 80), False)],
)
def test_a_map_of_unknown_input_lies_within_a_patch_of_the_edge(size: tuple[int, int], fits: bool) -> None:
    one = make_map(torch.ones(3, 4), box=Box(0, 0, 48, 64))
    place = Geometry((20, 30), size, Box(0, 0, 20, 30))
    if fits:
        assert one.to_heatmap(place).values.shape == (20, 30)
        return
    with pytest.raises(MapError, match="the map was made for 64 x 48 input pixels"):
        one.to_heatmap(place)


def test_sinks_and_query_are_marked_at_the_centers_of_their_cells() -> None:
    facts = MapFacts(sinks=((Sink(1, 2, 20.0, "blocks.1"),),), query_at=((1.0, 4.0),))
    layout = TokenLayout("tokens", (), (2, 3), Box(0, 1, 4, 10))
    heat = AttentionMap(torch.ones(2, 3), (), layout, {}, "attention", facts=facts).to_heatmap(PLACE)
    assert np.array(heat.marks) == pytest.approx(np.array([[4, 14.75]]))
    assert list(heat.query) == [(2, 8)]
    two = replace(facts, sinks=facts.sinks * 2)
    assert AttentionMap(torch.ones(2, 3), (), layout, {}, "attention", facts=two).to_heatmap(PLACE).marks == ()
