"""Saved maps load unchanged; files that are not maps are refused."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from tests.maps.making import WINDOWS, make_map
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, load_map, save_map
from visattn.core.provenance import Provenance, Sink
from visattn.core.records import TokenLayout
from visattn.errors import MapError, ShapeError


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


def test_saved_map_is_loaded_unchanged(tmp_path: Path) -> None:
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


def test_map_with_a_file_name_that_is_not_utf_8_is_loaded(tmp_path: Path) -> None:
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
    """Object that creates a file if it is ever unpickled."""

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
def test_array_that_is_not_a_map_is_refused(array: NDArray[Any], tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", array)
    with pytest.raises(MapError, match=r"array\.npy: not a map \(a map must be an array \(rows, columns\) of numbers"):
        load_map(tmp_path / "array.npy")


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"<html></html>", b"\x80\x04K\x01.", b"PK\x03\x04"], ids=["empty", "text", "html", "pickle", "zip"]
)
def test_file_that_is_not_a_map_is_refused(content: bytes, tmp_path: Path) -> None:
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
        pytest.param('"meaning": "rollout"', '"maening": "rollout"', id="key misspelled"),
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
    data[starts[0] + 6] |= 1  # encryption flag in the local header and in the directory
    directory = data.index(b"PK\x01\x02")
    data[directory + 8] |= 1
    (tmp_path / "map.npz").write_bytes(data)
    with pytest.raises(MapError, match=r"map\.npz: not a map"):
        load_map(tmp_path / "map.npz")


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4), st.floats(0, 1))
def test_damaged_map_is_refused_or_loaded_unchanged(
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
        assert torch.equal(back.values, attention_map.values)  # the archive's own checksum still matches
    assert not refusal or ("damaged.npz: " in refusal and refusal.isprintable())


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_map_without_a_cell_is_refused(shape: tuple[int, int]) -> None:
    layout = TokenLayout("tokens", (), shape, Box(0, 0, 32, 48))
    with pytest.raises(ShapeError, match=r"a map must have at least one cell, got the grid \((0, 4|4, 0)\)"):
        AttentionMap(torch.zeros(shape), (), layout, {}, "attention")
