"""Map files from untrusted sources: sizes and types are checked before use."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from visattn import load_image
from visattn.cli.commands import _run
from visattn.core.geometry import Box, Geometry
from visattn.core.images import image_facts as facts_of
from visattn.core.maps import AttentionMap, load_map, map_schema as schema, save_map
from visattn.core.provenance import Provenance, Sink
from visattn.core.records import TokenLayout
from visattn.errors import MapError

Facts = dict[str, Any]
NAN, HUGE = float("nan"), 10**400


def saved(**fields: Any) -> bytes:
    """Save a map of 2 heads on a grid of 2 x 3 cells."""
    provenance = Provenance(
        model="vit", image="p.png", sinks=((Sink(0, 1, 20.0, "blocks.0"),),), notes=("a note",), target=("class 3",), **fields
    )
    layout = TokenLayout("tokens", ("cls",), (2, 3), Box(0, 0, 32, 48))
    values = torch.arange(12.0).view(2, 2, 3)
    return save_map(
        AttentionMap(values, ("head",), layout, {"head": ("a", "b")}, "attention", provenance),
        Geometry((60, 90), (32, 48), Box(0, 0, 60, 90), "the whole photo"),
    )


def edited(edit: Callable[[Facts], object]) -> bytes:
    with np.load(io.BytesIO(saved())) as whole:
        facts, values = json.loads(str(whole["facts"])), whole["values"]
    edit(facts)
    stream = io.BytesIO()
    np.savez_compressed(stream, values=values, facts=np.array(json.dumps(facts)))
    return stream.getvalue()


def set_at(*path: Any) -> Callable[[Facts], None]:
    *keys, last, value = path

    def edit(facts: Facts) -> None:
        for key in keys:
            facts = facts[key]
        facts[last] = value

    return edit


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


P = "provenance"
HOSTILE = {
    **{f"{name} is NaN": set_at(P, name, NAN) for name in ("model", "weights", "image", "method", "normalization")},
    "random is text": set_at(P, "random", "no"),
    "parameters are a list": set_at(P, "parameters", []),
    "parameters hold NaN": set_at(P, "parameters", {"layer": {"x": [NAN]}}),
    "parameters hold an endless number": set_at(P, "parameters", {"layer": HUGE}),
    "parameters are deep": set_at(P, "parameters", {"layer": deep(200)}),
    "a glimpse without sides": set_at("facts", "glimpses", [[[[1, 2]]]]),
    "a glimpse of text": set_at("facts", "glimpses", [[["abc"]]]),
    "an empty glimpse": set_at("facts", "glimpses", [[[[3, 3, 3, 3]]]]),
    "an endless glimpse": set_at("facts", "glimpses", [[[[0, 0, 1e29, 1]]]]),
    "a query of numbers": set_at("facts", "query", 3),
    "sinks of text": set_at("facts", "sinks", [["abc"]]),
    "facts without a layer": set_at("facts", {}),
    "geometry is a list": set_at(P, "geometry", []),
    "photo is short": set_at(P, "geometry", "photo", [60]),
    "photo is text": set_at(P, "geometry", "photo", ["60", "90"]),
    "photo is endless": set_at(P, "geometry", "photo", [2**40, 2**40]),
    "window is NaN": set_at(P, "geometry", "window", [0, 0, NAN, 90]),
    "window is empty": set_at(P, "geometry", "window", [0, 0, 0, 90]),
    "window is thin": set_at(P, "geometry", "window", [0, 0, 1e-300, 90]),
    "window is endless": set_at(P, "geometry", "window", [0, 0, 1e29, 90]),
    "rule is a number": set_at(P, "geometry", "rule", 3),
    "box is NaN": set_at("layout", "box", [0, 0, NAN, 48]),
    "box is inside out": set_at("layout", "box", [32, 48, 0, 0]),
    "grid is one number": set_at("layout", "grid", [6]),
    "grid of booleans": set_at("layout", "grid", [True, 6]),
    "grid is negative": set_at("layout", "grid", [-2, -3]),
    "holes outside": set_at("layout", "holes", [9]),
    "holes are text": set_at("layout", "holes", ["1"]),
    "prefix is text": set_at("layout", "prefix", "cls"),
    "labels are text": set_at("labels", {"head": "ab"}),
    "labels of numbers": set_at("labels", {"head": [1, 2]}),
    "axes are numbers": set_at("axes", [1]),
    "meaning is a list": set_at("meaning", []),
    "notes hold an object": set_at(P, "notes", [{}]),
    "warnings are text": set_at(P, "warnings", "abc"),
    "sinks are flat": set_at(P, "sinks", [1, 2]),
    "a sink of text": set_at(P, "sinks", [[["a", 1, 2.0, "x"]]]),
    "a sink is infinite": set_at(P, "sinks", [[[0, 1, 1e999, "x"]]]),
    "value_range is short": set_at(P, "value_range", [1]),
    "versions are a list": set_at(P, "versions", ["1"]),
    "preprocessing of numbers": set_at(P, "preprocessing", {"size": 3}),
    "preprocessing without a source": set_at(P, "preprocessing", {"size": {"value": [1]}}),
    "no layout": lambda facts: facts.pop("layout"),
    "no box": lambda facts: facts["layout"].pop("box"),
    "unknown field": set_at(P, "modle", "x"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_facts_are_refused_when_they_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "map.npz").write_bytes(edited(HOSTILE[name]))
    with pytest.raises(MapError, match=r"map\.npz: not a map \("):
        load_map(tmp_path / "map.npz")


def test_facts_of_older_versions_are_read(tmp_path: Path) -> None:
    def older(facts: Facts) -> None:
        del facts["layout"]["holes"], facts["signed"], facts[P]["preprocessing"], facts[P]["drawing"]

    (tmp_path / "map.npz").write_bytes(edited(older))
    found = load_map(tmp_path / "map.npz")
    assert isinstance(found, tuple)
    assert found[0].values.shape == (2, 2, 3)


def header(kind: str, shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": kind, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def bomb(shape: tuple[int, int]) -> bytes:
    """Write a small file whose values would fill the memory."""
    with np.load(io.BytesIO(saved())) as whole:
        facts = whole["facts"]
    text, stream = io.BytesIO(), io.BytesIO()
    np.save(text, facts)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("facts.npy", text.getvalue())
        with archive.open("values.npy", "w") as member:
            member.write(header("<f4", shape))
            for _ in range(shape[0]):
                member.write(bytes(4 * shape[1]))
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_values_that_would_fill_the_memory_are_refused_before_they_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"bomb.{kind}"
    path.write_bytes(bomb((9000, 4000)) if kind == "npz" else header("<f4", (1_000_000, 1_000_000)) + bytes(64))
    tracemalloc.start()  # counts NumPy's arrays too
    try:
        with pytest.raises(MapError, match=r"bomb\.np.: not a map \(its \d+ x \d+ values are more than 33,554,432\)"):
            load_map(path)
        assert tracemalloc.get_traced_memory()[1] < 64e6
    finally:
        tracemalloc.stop()


def test_facts_that_would_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_MOST_TEXT", 1000)
    (tmp_path / "map.npz").write_bytes(edited(set_at(P, "notes", ["x" * 1000])))
    with pytest.raises(MapError, match=r"its facts take [\d,]+ bytes, more than 1,000"):
        load_map(tmp_path / "map.npz")


def test_array_that_is_shorter_than_its_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.npy").write_bytes(header("<f4", (5000, 5000)) + bytes(64))
    with pytest.raises(MapError, match=r"cut\.npy: not a map"):
        load_map(tmp_path / "cut.npy")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(tmp_path / "p.png")
    return tmp_path / "p.png"


def overlaid(photo: Path, content: bytes) -> int:
    (photo.parent / "map.npz").write_bytes(content)
    return _run(["overlay", str(photo), "--map", str(photo.parent / "map.npz"), "-o", str(photo.parent / "o.png")], debug=False)


def test_map_of_this_photo_with_another_size_is_refused(photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overlaid(photo, saved(image_sha256=facts_of(load_image(photo)).sha256)) == 4
    assert (
        "p.png: the map belongs to this photo with 90 x 60 pixels, got 40 x 30. Compute the map again." in capsys.readouterr().err
    )


def test_map_of_another_photo_is_laid_over_this_one(photo: Path) -> None:
    assert overlaid(photo, saved(image_sha256="0" * 64)) == 0


def test_components_that_are_not_three_are_refused(photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overlaid(photo, edited(lambda facts: facts.update(axes=["component"], labels={}))) == 2
    assert "components must be (3, " in capsys.readouterr().err


def test_loading_a_map_runs_and_imports_nothing(tmp_path: Path) -> None:
    """Start a fresh process, so that nothing the file might import is already loaded."""
    (tmp_path / "map.npz").write_bytes(edited(set_at(P, "model", "__import__('antigravity')")))
    code = "import sys; from visattn.core.maps import load_map; load_map(sys.argv[1]); print('antigravity' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "map.npz")], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (5, " must be a list or null, got a whole number"),
        ([1], " must be a list of length 2, got 1"),
        (["x", "y"], r"\[0\] must be a whole number, got text"),
    ],
)
def test_input_size_of_another_type_is_refused(size: object, told: str, tmp_path: Path) -> None:
    (tmp_path / "m.npz").write_bytes(edited(set_at("facts", "input_size", size)))
    with pytest.raises(MapError, match=rf"not a map \(facts\.input_size{told}"):
        load_map(tmp_path / "m.npz")


@pytest.mark.parametrize("number", [NAN, float("inf")])
def test_a_parameter_that_no_file_can_hold_is_refused_before_it_is_written(number: float) -> None:
    with pytest.raises(MapError, match="has a parameter that is NaN or infinite"):
        saved(parameters={"scale": [1.0, number]})
