"""Maps, geometries, styles and cells cannot be changed; facts are compared by value, and arrays by identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.drawing.overlaying import GRID, heatmap
from tests.maps.making import random_map
from visattn.core.drawing.pages import Bar, Cell
from visattn.core.drawing.style import Style
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import Detection, MapFacts
from visattn.core.methods.method_table import METHODS
from visattn.core.provenance import Sink

PICTURE = Image.new("RGB", (3, 2))

BY_VALUE: dict[str, tuple[Callable[[], Any], str]] = {
    "geometry": (lambda: Geometry((24, 36), (32, 48), Box(0, 0, 24, 36), "whole"), "photo"),
    "facts": (lambda: MapFacts(layer="a", query="cls", query_at=((1.0, 2.0),)), "layer"),
    "style": (lambda: Style(opacity=0.5, contours=[0.5]), "opacity"),
    "bar": (lambda: Bar("inferno", ("0", "1"), "attention"), "label"),
}
BY_IDENTITY: dict[str, tuple[Callable[[], Any], str]] = {
    "map": (random_map, "meaning"),
    "heatmap": (lambda: heatmap(GRID), "meaning"),
}


@pytest.mark.parametrize("name", list(BY_VALUE))
def test_facts_are_fixed_and_compared_by_value(name: str) -> None:
    make, field = BY_VALUE[name]
    one, other = make(), make()
    assert one == other
    assert len({one, other}) == 1
    with pytest.raises(FrozenInstanceError):
        setattr(one, field, getattr(one, field))


@pytest.mark.parametrize("name", list(BY_IDENTITY))
def test_arrays_are_fixed_and_compared_by_identity(name: str) -> None:
    make, field = BY_IDENTITY[name]
    one, other = make(), make()
    assert one == one
    assert one != other
    assert len({one, other}) == 2
    with pytest.raises(FrozenInstanceError):
        setattr(one, field, getattr(one, field))


def test_cells_and_methods_are_fixed() -> None:
    for fixed, field in ((Cell(PICTURE), "caption"), (METHODS["rollout"], "targeted")):
        with pytest.raises(FrozenInstanceError):
            setattr(fixed, field, getattr(fixed, field))


def test_a_map_without_facts_says_nothing_about_itself() -> None:
    facts = MapFacts()
    assert (facts.layer, facts.query, facts.query_at, facts.sinks, facts.glimpses, facts.detections) == ("", "", (), (), (), ())
    assert facts.sinks_kept
    assert not facts.pixelwise
    assert not facts.interval
    assert facts.input_size is None
    assert facts.path() == {}


def test_glimpses_are_told_by_their_centers_and_the_sizes_of_their_patches() -> None:
    first = (Box(0, 0, 2, 3.0006), Box(-1, -2, 3, 5)), (Box(4, 6, 6, 9.0006), Box(3, 4, 7, 11))
    second = (Box(1, 1, 3, 4.0006), Box(0, -1, 4, 6)), (Box(0, 0, 2, 3.0006), Box(-1, -2, 3, 5))
    facts = MapFacts(glimpses=(first, second), sinks=((Sink(0, 1, 20.0, "a"),), ()))
    centers = [[1.5, 1.0], [7.5, 5.0]], [[2.5, 2.0], [1.5, 1.0]]
    assert facts.path() == {"path": list(centers), "patches": [[2, 3.001], [4, 7]]}
    assert facts.of_image(1).path() == {"path": centers[1], "patches": [[2, 3.001], [4, 7]]}
    assert facts.of_image(1).sinks == ((),)
    assert facts.of_image(0).sinks == ((Sink(0, 1, 20.0, "a"),),)
    assert MapFacts(layer="a").of_image(1) == MapFacts(layer="a")


def test_facts_are_read_from_plain_values_of_this_version_or_an_older_one() -> None:
    facts = MapFacts(
        query_at=((1.5, 2.5),),
        sinks=((Sink(0, 1, 20.0, "a"),), ()),
        glimpses=(((Box(0, 0, 2, 3),),),),
        detections=(Detection("cat", Box(1, 2, 3, 4)),),
        input_size=(32, 48),
        sinks_kept=False,
    )
    assert MapFacts.from_dict(facts.to_dict()) == facts
    plain = facts.to_dict() | {
        "query_at": [[1.5, 2.5]],
        "sinks": [[[0, 1, 20.0, "a"]], []],
        "glimpses": [[[[0, 0, 2, 3]]]],
        "detections": [["cat", [1, 2, 3, 4]]],
        "input_size": [32, 48],
    }
    assert MapFacts.from_dict(plain) == facts
    old = {key: value for key, value in plain.items() if key not in ("query_at", "detections", "input_size")}
    read = MapFacts.from_dict(old)
    assert (read.query_at, read.detections, read.input_size) == ((), (), None)
    assert read.sinks == facts.sinks


def test_an_entry_of_a_heatmap_is_counted_from_either_end_of_its_axis() -> None:
    values = np.arange(24.0).reshape(4, 2, 3)
    heat = heatmap(values, axes=("head",))
    for index, entry in ((0, 0), (3, 3), (-1, 3), (-4, 0)):
        found = heat.at(head=index)
        np.testing.assert_array_equal(found.grid, values[entry])
        np.testing.assert_array_equal(found.values, heat.values[entry])
        assert found.axes == ()
    for index in (4, -5):
        with pytest.raises(Exception, match=rf"head must lie in \[-4, 3\], got {index}"):
            heat.at(head=index)
    both = heatmap(values.reshape(2, 2, 2, 3), axes=("layer", "head"))
    assert both.at(layer=1).axes == ("head",)
    assert both.at(head=1).axes == ("layer",)
    np.testing.assert_array_equal(both.at(layer=1, head=0).grid, values[2])


def test_the_size_of_a_plain_map_is_that_of_its_values() -> None:
    made = random_map(2, 3)
    assert np.asarray(made).shape == made.numpy().shape == (2, 3)
    assert np.asarray(heatmap(GRID)).shape == (24, 36)
