"""Facts about maps, and what files of maps may hold, with values worked out by hand."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from tests.maps.making import make_map
from visattn._support.json_files import SIDE
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import MapFacts, load_map, map_formats, map_schema, save_map
from visattn.core.maps.map_facts import Detection
from visattn.core.provenance import Provenance, Sink
from visattn.errors import MapError

# ---- facts ------------------------------------------------------------------------------------------------------------------------


def test_facts_have_documented_defaults() -> None:
    made = MapFacts()
    assert (made.layer, made.query, made.query_at, made.sinks, made.glimpses, made.detections) == ("", "", (), (), (), ())
    assert (made.sinks_kept, made.pixelwise, made.interval, made.input_size) == (True, False, False, None)


def test_path_of_glimpses_is_their_centers_with_three_decimals() -> None:
    first = ((Box(1, 2, 4, 8), Box(0, 0, 9, 11)), (Box(0, 1, 0.66666, 2.33333), Box(0, 0, 9, 11)))
    assert MapFacts().path() == {}
    assert MapFacts(glimpses=(first,)).path() == {"path": [[5, 2.5], [1.667, 0.333]], "patches": [[3, 6], [9, 11]]}
    both = MapFacts(glimpses=(first, first[:1]))
    assert both.path()["path"] == [[[5, 2.5], [1.667, 0.333]], [[5, 2.5]]]
    assert both.of_image(1).path()["path"] == [[5, 2.5]]
    assert MapFacts().of_image(1) == MapFacts()


def test_facts_are_restored_from_json() -> None:
    facts = MapFacts(
        "l",
        "q",
        ((1.5, 2.5),),
        ((Sink(0, 2, 20.0, "b"),),),
        False,
        (((Box(1, 2, 4, 8),),),),
        (Detection("cat", Box(1, 2, 3, 5)),),
        True,
        True,
        (32, 48),
    )
    assert MapFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts


# ---- files ------------------------------------------------------------------------------------------------------------------------


def places(edit: Callable[[dict[str, Any]], object]) -> None:
    facts: dict[str, Any] = {
        "layout": {"box": [0, 0, 4, 6], "grid": [2, 3], "holes": [0, 5]},
        "provenance": {"geometry": {"window": [0, 0, 4, 6]}},
        "facts": {"glimpses": [[[[0, 0, 4, 6]]]], "detections": [["cat", [0, 0, 4, 6]]]},
    }
    edit(facts)
    map_schema.check_places(cast(Any, facts))


BOXES: dict[str, Callable[[dict[str, Any], list[float]], object]] = {
    "its box": lambda facts, box: facts["layout"].update(box=box),
    "its window": lambda facts, box: facts["provenance"]["geometry"].update(window=box),
    "a glimpse": lambda facts, box: facts["facts"].update(glimpses=[[[[0, 0, 4, 6], box]]]),
    "a detection": lambda facts, box: facts["facts"].update(detections=[["cat", box]]),
}


@pytest.mark.parametrize("name", BOXES)
def test_sides_of_stored_boxes_have_bounds(name: str) -> None:
    most = SIDE
    for fine in ([0, 0, 2e-3, 2e-3], [0, 0, most, most], [1, 3, 1.5, 3.5]):
        places(lambda facts, box=fine: BOXES[name](facts, box))  # type: ignore[misc]
    for wrong in ([0, 0, 5e-4, 6], [0, 0, 4, 5e-4], [0, 0, most + 1, 6], [0, 0, 4, most + 1], [4, 0, 4, 6], [0, 7, 4, 6]):
        with pytest.raises(ValueError, match=f"{name} must have sides of 0.001 to"):
            places(lambda facts, box=wrong: BOXES[name](facts, box))  # type: ignore[misc]


@pytest.mark.parametrize("grid", [[6], [1, 2, 3], [0, 6], [6, 0], [-1, -6]])
def test_a_stored_grid_has_rows_and_columns(grid: list[int]) -> None:
    with pytest.raises(ValueError, match="its grid must have rows and columns"):
        places(lambda facts: facts["layout"].update(grid=grid))


@pytest.mark.parametrize(
    ("holes", "fine"), [([], True), ([0, 1, 5], True), ([5, 0], False), ([0, 0], False), ([6], False), ([-1], False)]
)
def test_stored_holes_are_cells_in_order(holes: list[int], fine: bool) -> None:
    if fine:
        places(lambda facts: facts["layout"].update(holes=holes))
        return
    with pytest.raises(ValueError, match="its holes must be cells of the grid, in ascending order"):
        places(lambda facts: facts["layout"].update(holes=holes))


def test_numbers_of_images_use_all_steps_and_keep_0_for_holes() -> None:
    values = np.array([[-1, 0.5, 2]], np.float32)
    numbers, stated = map_formats._numbers(values)
    assert numbers.tolist() == [[0, 32768, 65535]]
    assert stated == {"scale": pytest.approx(3 / 65535), "offset": -1, "nodata": None}
    numbers, stated = map_formats._numbers(np.array([[-1, np.nan, 2]], np.float32))
    assert numbers.tolist() == [[1, 0, 65535]]
    assert stated == {"scale": pytest.approx(3 / 65534), "offset": pytest.approx(-1 - 3 / 65534), "nodata": 0}
    assert map_formats._numbers(np.full((1, 2), 7, np.float32))[0].tolist() == [[0, 0]]
    assert map_formats._numbers(np.full((1, 2), 7, np.float32))[1] == {"scale": 0, "offset": 7, "nodata": None}
    numbers, stated = map_formats._numbers(np.full((1, 2), np.nan, np.float32))
    assert (numbers.tolist(), stated) == ([[0, 0]], {"scale": 0, "offset": 0, "nodata": 0})


@pytest.mark.parametrize(
    ("value", "fine"),
    [(1, True), (1.5, True), (-9e38, True), (1e39, False), (-1e39, False), (True, False), ("1", False), (None, False)],
)
def test_scales_of_images_are_numbers_of_float32(value: Any, fine: bool) -> None:
    assert map_formats._is_number(value) is fine


def test_images_and_tables_of_the_most_values_are_read_and_larger_ones_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(map_schema, "MOST_VALUES", 15)
    for rows, fine in ((3, True), (4, False)):
        for ending in ("png", "tif", "csv", "npy"):
            numbers = np.arange(rows * 5, dtype=np.uint16).reshape(rows, 5)
            stream = io.BytesIO()
            if ending == "npy":
                np.save(stream, numbers)
            elif ending == "csv":
                np.savetxt(stream, numbers, delimiter=",")
            else:
                Image.fromarray(numbers).save(stream, "PNG" if ending == "png" else "TIFF")
            file = tmp_path / f"{rows}.{ending}"
            file.write_bytes(stream.getvalue())
            if fine:
                assert cast(Any, load_map(file)).tolist() == numbers.tolist()
                continue
            with pytest.raises(MapError, match="more than 15"):
                load_map(file)


def test_a_line_of_the_most_characters_is_read_and_a_longer_one_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(map_formats, "_MOST_TEXT", 5)
    file = tmp_path / "a.csv"
    file.write_text("1,23\n")
    assert cast(Any, load_map(file)).tolist() == [[1, 23]]
    file.write_text("1,23\n1,234\n")
    with pytest.raises(MapError, match="its line 2 has more than 5 characters"):
        load_map(file)


def test_facts_of_the_most_bytes_are_read_and_longer_ones_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    file.write_bytes(save_map(make_map(torch.ones(2, 3)), Geometry((4, 6), (32, 48), Box(0, 0, 4, 6))))
    with zipfile.ZipFile(file) as archive:
        size = archive.getinfo("facts.npy").file_size
    monkeypatch.setattr(map_schema, "_MOST_TEXT", size)
    assert isinstance(load_map(file), tuple)
    monkeypatch.setattr(map_schema, "_MOST_TEXT", size - 1)
    with pytest.raises(MapError, match=f"its facts take {size:,} bytes, more than {size - 1:,}"):
        load_map(file)


def test_columns_of_a_table_are_those_of_its_first_line(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    for text, said in (("1,2\n3\n", "its line 2 has 1 columns, and the first 2"), ("1\n\n2,3\n", "its line 3 has 2 columns")):
        file.write_text(text)
        with pytest.raises(MapError, match=said):
            load_map(file)
    file.write_text("\ufeff# a note\n1,,3\n 4 , 5,6\n", encoding="utf-8")
    assert np.array_equal(cast(Any, load_map(file)), np.array([[1, np.nan, 3], [4, 5, 6]]), equal_nan=True)


def test_a_saved_map_is_an_archive_by_default() -> None:
    assert save_map(make_map(torch.ones(2, 3)), Geometry((4, 6), (32, 48), Box(0, 0, 4, 6))).startswith(b"PK")


@pytest.mark.parametrize("ending", ["npz", "csv", "tif", "png"])
def test_names_of_images_that_are_not_utf_8_are_restored(ending: Any, tmp_path: Path) -> None:
    made = make_map(torch.ones(2, 3), provenance=Provenance(versions={}, image="a\udcff.png"))
    file = tmp_path / f"a.{ending}"
    file.write_bytes(save_map(made, Geometry((4, 6), (32, 48), Box(0, 0, 4, 6)), ending))
    found = load_map(file)
    assert isinstance(found, tuple)
    assert found[0].provenance.image == "a\udcff.png"
