"""Maps on the grid: the class, its axes, and the mass mask."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from tests.maps.making import WINDOWS, make_map, quick, random_map
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, MapFacts, normalize
from visattn.core.provenance import Sink
from visattn.core.records import TokenLayout
from visattn.errors import MapError, OptionError, ShapeError


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


def test_at_of_a_batch_gives_no_warning_about_removed_sinks() -> None:
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
    assert mean.provenance.parameters == {"mean over 3 heads": True}
    assert panels.provenance.parameters == {}


@pytest.mark.parametrize("index", [3, -4, 99])
def test_at_outside_the_axis_is_refused(panels: AttentionMap, index: int) -> None:
    with pytest.raises(OptionError, match=rf"head must lie in \[-3, 2\], got {index}"):
        panels.at(head=index)


def test_at_of_an_unknown_axis_is_refused_with_the_known_ones(panels: AttentionMap) -> None:
    with pytest.raises(OptionError, match=r"unknown axis 'heads'; did you mean 'head'\? Known: layer, head"):
        panels.at(heads=0)


def test_heatmap_at_selects_values_grid_and_labels(panels: AttentionMap) -> None:
    heat = panels.to_heatmap(WINDOWS["crop"])
    one = heat.at(head=2)
    assert one.axes == ("layer",)
    assert one.labels == {"layer": ("blocks.0", "blocks.1")}
    assert np.array_equal(one.values, heat.values[:, 2])
    assert np.array_equal(one.grid, heat.grid[:, 2])


def test_heatmap_at_outside_the_axis_is_refused(panels: AttentionMap) -> None:
    with pytest.raises(OptionError, match=r"layer must lie in \[-2, 1\], got 2"):
        panels.to_heatmap(WINDOWS["crop"]).at(layer=2)


def dino_mask(values: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Compute the mask as visualize_attention.py of DINO: sort, divide by the sum, keep where the cumulative sum exceeds 1 - share."""
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
    """Try all 64 subsets of a 2 x 3 grid."""
    mask = make_map(torch.tensor(values, dtype=torch.float64).view(2, 3)).mass(share).values.flatten().tolist()
    need = share * sum(values) - 1e-9
    enough = [len(chosen) for n in range(7) for chosen in itertools.combinations(values, n) if sum(chosen) >= need]
    assert sum(mask) == min(enough)
    assert sum(value for value, kept in zip(values, mask, strict=True) if kept) >= need


@pytest.mark.parametrize(("share", "cells"), [(0.1, 1), (0.3, 3), (0.6, 6), (0.7, 7), (0.9, 9), (1.0, 10)])
def test_mass_of_ten_equal_cells_is_a_tenth_each(share: float, cells: int) -> None:
    assert make_map(torch.full((2, 5), 0.1)).mass(share).values.sum() == cells


def test_mass_of_0_keeps_no_cell() -> None:
    assert not random_map().mass(0).values.any()


def test_mass_of_1_keeps_every_nonzero_cell() -> None:
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
    with pytest.raises(MapError, match="needs grids of non-negative values with a positive sum"):
        make_map(values, ("head",) if isinstance(values[0][0], list) else ()).mass()


def test_a_heatmap_without_panels_has_no_scale() -> None:
    heat = make_map(torch.zeros(0, 2, 3), ("head",)).to_heatmap(Geometry((32, 48), (32, 48), Box(0, 0, 32, 48)))
    with pytest.raises(MapError, match=r"a heatmap to normalize must have values, got the shape \(0, 32, 48\)"):
        normalize(heat)


def test_values_whose_range_overflows_float32_are_scaled() -> None:
    heat = make_map([[3e38, -3e38, 0.0]]).to_heatmap(Geometry((16, 48), (16, 48), Box(0, 0, 16, 48)), "nearest")
    assert np.allclose(normalize(heat).values[0, [0, 20, 40]], [1, 0, 0.5])
