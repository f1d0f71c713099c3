"""Means and differences of maps, against loops over cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.maps.making import make_map
from visattn import Geometry
from visattn.core.geometry import Box
from visattn.core.maps import AttentionMap, MapFacts, difference, mean_map
from visattn.core.maps.arithmetic import MapSum
from visattn.core.provenance import Provenance
from visattn.core.records import TokenLayout
from visattn.errors import MapError, OptionError

GRID = (2, 3)
Cells = dict[tuple[int, int], float]


def placed(seed: int, geometry: Geometry | None = None, *, signed: bool = False, **facts: Any) -> AttentionMap:
    """Build a map of a photo of its own."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(GRID, generator=generator) if signed else torch.rand(GRID, generator=generator)
    made = {"model": "vit", "method": "rollout", "image": f"{seed}.png", "image_sha256": f"{seed:064x}", **facts}
    return make_map(values, provenance=Provenance(geometry=geometry, versions={}, **made))


def cells(one: AttentionMap) -> Cells:
    """Return the value of each cell that has one and whose center lies on the photo."""
    place, found = one.provenance.geometry, {}
    for row in range(GRID[0]):
        for column in range(GRID[1]):
            if row * GRID[1] + column in one.layout.holes:
                continue
            if place is not None:
                y = place.window.top + (16 * row + 8) * (place.window.bottom - place.window.top) / place.input[0]
                x = place.window.left + (16 * column + 8) * (place.window.right - place.window.left) / place.input[1]
                if not (0 <= y < place.photo[0] and 0 <= x < place.photo[1]):
                    continue
            found[row, column] = float(one.values[row, column])
    return found


def slow_mean(maps: Sequence[AttentionMap], scale: str) -> Cells:
    values: dict[tuple[int, int], list[float]] = {}
    for one in maps:
        own = cells(one)
        size = math.fsum(abs(value) for value in own.values()) / len(own) if scale == "relative" else 1.0
        if size == 0:
            continue
        for place, value in own.items():
            values.setdefault(place, []).append(value / size)
    return {place: math.fsum(some) / len(some) for place, some in values.items()}


def slow_counts(maps: Sequence[AttentionMap], scale: str) -> list[int]:
    """Count the maps that each cell of the grid has a value of; those that are zero everywhere have no relative scale."""
    counted = [cells(one) for one in maps if scale == "raw" or one.values.any()]
    return [sum(place in one for one in counted) for place in np.ndindex(*GRID)]


def same(one: AttentionMap, expected: Cells) -> bool:
    known = {place for place in np.ndindex(*GRID) if not math.isnan(float(one.values[place]))}
    return known == set(expected) and all(math.isclose(float(one.values[at]), expected[at], rel_tol=1e-5) for at in known)


PADDED = Geometry((30, 64), (32, 48), Box(-20, 0, 44, 64))  # of whose upper row the centers lie above the photo
CROPPED = Geometry((90, 90), (32, 48), Box(20, 10, 60, 70))


@pytest.mark.parametrize("scale", ["relative", "raw"])
@pytest.mark.parametrize("signed", [False, True])
def test_mean_is_that_of_a_loop_over_maps_with_padding_crops_holes_and_zeros(scale: Any, signed: bool) -> None:
    holed = replace(placed(3, CROPPED, signed=signed), layout=TokenLayout("tokens", ("cls",), GRID, Box(0, 0, 32, 48), (1, 4)))
    empty = replace(placed(4), values=torch.zeros(GRID))
    maps = [placed(1, PADDED, signed=signed), placed(2, CROPPED, signed=signed), holed, empty]
    mean = mean_map(iter(maps), scale)
    assert same(mean, slow_mean(maps, scale))
    assert mean.signed == signed
    told = mean.provenance
    assert told.parameters == {"mean of maps": 3 + (scale == "raw"), "scale of maps": scale}
    assert any("zero everywhere" in note for note in told.notes) == (scale == "relative")
    fewest, most = min(slow_counts(maps, scale)), max(slow_counts(maps, scale))
    assert any(note.startswith(f"cells have {fewest} to {most} maps, as parts") for note in told.notes)
    assert told.geometry is not None
    assert (told.model, told.method) == ("vit", "rollout")
    assert (told.geometry.photo, told.geometry.window) == ((32, 48), Box(0, 0, 32, 48))


def test_cells_that_no_photo_reaches_have_no_mean() -> None:
    mean = mean_map([placed(1, PADDED), placed(2, PADDED)])
    assert mean.layout.holes == (0, 1, 2)
    assert mean.values[0].isnan().all()
    assert mean.values[1].isfinite().all()


def test_sums_do_not_depend_on_the_order_in_which_they_are_joined() -> None:
    maps = [placed(seed, CROPPED if seed % 2 else PADDED) for seed in range(7)]
    one, two, three = (mean_map(order) for order in (maps, maps[::-1], maps[3:] + maps[:3]))
    first = MapSum.of(maps[0]).plus(MapSum.of(maps[1]))
    rest = MapSum.of(maps[2])
    for each in maps[3:]:
        rest = rest.plus(MapSum.of(each))
    joined = rest.plus(first).mean()
    for other in (two, three, joined):
        assert torch.allclose(one.values, other.values, rtol=1e-6, equal_nan=True)
        assert one.provenance.image_sha256 == other.provenance.image_sha256 == f"{sum(range(7)):064x}"


def test_relative_maps_count_alike_whatever_their_size() -> None:
    one, other = placed(1), placed(2)
    loud = replace(other, values=other.values * 1000)
    assert torch.allclose(mean_map([one, other]).values, mean_map([one, loud]).values)
    assert not torch.allclose(mean_map([one, other], "raw").values, mean_map([one, loud], "raw").values, rtol=0.1)
    assert mean_map([one, other]).values.mean() == pytest.approx(1)


def test_one_photo_keeps_its_place_and_the_facts_that_all_maps_share() -> None:
    one, other = (placed(5, CROPPED, parameters={"layer": layer, "head": "all"}, notes=("a", str(layer))) for layer in (1, 2))
    mean = mean_map([one, other])
    assert (mean.provenance.image, mean.provenance.geometry) == ("5.png", CROPPED)
    assert mean.provenance.parameters["head"] == "all"
    assert "layer" not in mean.provenance.parameters
    assert mean.provenance.notes[0] == "a"


def test_random_weights_of_one_are_told_of_all() -> None:
    assert mean_map([placed(1), placed(2, random=True)]).provenance.random


def test_signed_means_are_not_scaled_again() -> None:
    one = placed(1, signed=True)
    mean = mean_map([one, replace(one, values=-0.5 * one.values)])
    other = mean_map([placed(2, signed=True)])
    assert mean.meaning == "relative attention"
    again = mean_map([mean, other])
    assert torch.allclose(again.values, (mean.values + other.values) / 2)
    placeless = [replace(each, provenance=Provenance(versions={})) for each in (mean, other)]  # provenance decides nothing
    assert torch.allclose(difference(placeless[0], placeless[1]).values, mean.values - other.values)


def test_heads_stay_apart_and_keep_their_relation() -> None:
    one = make_map(torch.rand(2, *GRID, generator=torch.Generator().manual_seed(0)) + 0.1, ("head",))
    mean = mean_map([one, replace(one, values=one.values * 3)])
    assert mean.axes == ("head",)
    assert torch.allclose(mean.values, one.values / one.values.mean())


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (make_map(torch.rand(3, 2)), "3 x 2 cells"),
        (make_map(torch.rand(GRID), box=Box(0, 0, 30, 48)), "0 to 30"),
        (replace(placed(1), facts=MapFacts(input_size=(64, 96))), "96 x 64"),
        (make_map(torch.rand(2, *GRID), ("head",)), "head 2"),
        (make_map(torch.rand(GRID), meaning="rollout"), "relative attention and relative rollout"),
        (make_map(torch.rand(GRID), meaning="principal component"), "sign"),
        (make_map(torch.rand(2, *GRID), ("batch",)), r"at\(batch=0\)"),
        (replace(placed(1), facts=MapFacts(interval=True)), "raw"),
    ],
    ids=["grid", "box", "input", "axes", "quantity", "components", "batch", "interval"],
)
def test_maps_that_have_no_common_mean_are_refused(other: AttentionMap, cause: str) -> None:
    with pytest.raises(MapError, match=cause):
        mean_map([placed(1), other])


def test_no_map_and_only_empty_maps_have_no_mean() -> None:
    with pytest.raises(MapError, match="none"):
        mean_map([])
    with pytest.raises(MapError, match="zero everywhere"):
        mean_map([replace(placed(1), values=torch.zeros(GRID))])
    with pytest.raises(OptionError, match="scale"):
        mean_map([placed(1)], "sum")  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", ["relative", "raw"])
def test_difference_is_that_of_a_loop_over_cells(scale: Any) -> None:
    one = replace(placed(1, CROPPED), layout=TokenLayout("tokens", (), GRID, Box(0, 0, 32, 48), (2,)))
    other = placed(2, CROPPED)
    a, b = slow_mean([one], scale), slow_mean([other], scale)
    found = difference(one, other, scale)
    assert same(found, {place: a[place] - b[place] for place in a})
    assert found.signed
    assert found.meaning == f"difference of {'relative ' if scale == 'relative' else ''}attention"
    assert found.provenance.image == "1.png minus 2.png"
    assert found.provenance.parameters["scale of maps"] == scale
    assert same(difference(other, one, scale), {place: b[place] - a[place] for place in a})


def test_equal_maps_differ_by_nothing_and_stay_signed() -> None:
    found = difference(placed(1, CROPPED), placed(1, CROPPED))
    assert not found.values.any()
    assert found.signed


def test_differences_of_other_places_are_refused() -> None:
    with pytest.raises(MapError, match="different places"):
        difference(placed(1, CROPPED), placed(1, PADDED))
    with pytest.raises(MapError, match="different places"):
        difference(placed(1, CROPPED), placed(1))
    with pytest.raises(MapError, match="cells"):
        difference(placed(1), make_map(torch.rand(4, 6)))
    with pytest.raises(MapError, match="zero everywhere"):
        difference(placed(1), replace(placed(1), values=torch.zeros(GRID)))
    rollout = replace(placed(2), meaning="rollout")
    with pytest.raises(MapError, match="attention and rollout"):
        difference(placed(1), rollout, "raw")
    assert difference(placed(1), rollout).meaning == "relative attention minus relative rollout"


@pytest.mark.parametrize("given", [[placed(1).values], [None], 3, None], ids=["tensors", "None in a list", "number", "None"])
def test_what_is_no_list_of_maps_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="map"):
        mean_map(given)
    with pytest.raises(OptionError, match=r"explanation\.map"):
        difference(placed(1), given)


def test_one_map_is_no_list_of_maps() -> None:
    with pytest.raises(OptionError, match="several"):
        mean_map(placed(1))  # type: ignore[arg-type]


def test_sums_of_two_scales_are_not_added() -> None:
    with pytest.raises(MapError, match="one scale"):
        MapSum.of(placed(1), "raw").plus(MapSum.of(placed(2)))
