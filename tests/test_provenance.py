from __future__ import annotations

import ast
import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import visattn
from tests import tiny
from visattn.core import provenance
from visattn.core.geometry import Box, Geometry
from visattn.core.provenance import Provenance, Sink, versions

FULL = Provenance(
    model="vit_tiny",
    weights="hub",
    weights_sha256="ab" * 32,
    random=True,
    image="duck.png",
    image_sha256="cd" * 32,
    geometry=Geometry((10, 20), (32, 48), Box(0.5, 0, 9.5, 20), "the whole photo"),
    method="rollout",
    parameters={"fusion": "mean", "discard": 0.9, "layers": [0, 1]},
    target=("class 3",),
    scores=({"class": 3, "name": None, "score": 1.5, "probability": 0.25},),
    normalization="minmax, one scale over head",
    value_range=(0.001, 0.25),
    sinks=((Sink(0, 1, 12.5, "blocks.1"), Sink(1, 0, 9.0, "blocks.0")), ()),
    notes=("a", "b"),
    warnings=("c",),
    versions={"torch": "2"},
)


@pytest.mark.parametrize("provenance", [Provenance(), FULL], ids=["empty", "full"])
def test_provenance_round_trips_through_json(provenance: Provenance) -> None:
    assert Provenance.from_dict(json.loads(json.dumps(provenance.to_dict()))) == provenance


def test_every_fact_is_written() -> None:
    assert set(FULL.to_dict()) == set(vars(FULL))


def test_facts_are_set_in_a_copy() -> None:
    changed = FULL.but(method="attention", value_range=(0.0, 1.0))
    assert (changed.method, changed.value_range) == ("attention", (0.0, 1.0))
    assert (FULL.method, FULL.value_range) == ("rollout", (0.001, 0.25))


def test_notes_and_warnings_are_added_in_order_and_none_twice() -> None:
    changed = FULL.but(notes=("d", "a", "d"), warnings=("c", "e"))
    assert (changed.notes, changed.warnings) == (("a", "b", "d"), ("c", "e"))


def test_unknown_fact_is_refused() -> None:
    with pytest.raises(TypeError, match="modle"):
        Provenance().but(modle="x")


@pytest.mark.parametrize("data", [{"modle": "x"}, {"geometry": {"photo": [1, 2]}}, {"sinks": [[[1]]]}], ids=str)
def test_wrong_facts_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises((TypeError, KeyError)):
        Provenance.from_dict(data)


@pytest.mark.parametrize("name", ["torch", "timm", "numpy", "pillow"])
def test_versions_are_those_installed(name: str) -> None:
    assert versions()[name] == metadata.version(name)


def test_versions_leave_out_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "timm":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(provenance, "_installed", provenance._installed.__wrapped__)  # the uncached function
    assert "timm" not in versions()
    assert versions()["torch"] == "1.0"


def test_versions_of_two_provenances_are_not_one_dictionary() -> None:
    first = Provenance()
    first.versions["torch"] = "changed"
    assert Provenance().versions["torch"] != "changed"


WRITTEN = {"parameters", "sinks", "target", "scores", "normalization", "value_range", "drawing", "preprocessing", "method"}
PRINTS = {"talk.py", "study_payload.py", "provenance.py"}  # the first two print fields, the last defines the class


def _read(path: Path) -> list[str]:
    """Find where fields of a provenance are read, except to be written again: `{**facts}`, `facts | more`, `facts.but(...)`."""
    tree, found = ast.parse(path.read_text()), []
    kept = {id(node.left) for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in WRITTEN and id(node) not in kept:
            holder = ast.unparse(node.value)
            if holder.split(".")[-1] == "provenance" or (holder == "made" and path.name == "attention_maps.py"):
                found.append(f"{path.name}, line {node.lineno}: {ast.unparse(node)}")
    return found


def test_provenance_is_written_and_never_used_as_data() -> None:
    """Require that computing and drawing read typed fields: changing a note must not change a picture."""
    files = [path for path in (Path(visattn.__file__).parent).rglob("*.py") if path.name not in PRINTS]
    read = [where for path in files for where in _read(path)]
    of_one_image = [where for where in read if "attention_maps.py" in where and where.endswith(("made.target", "made.scores"))]
    by_class = [where for where in read if where.startswith("means.py") and ".provenance." in where]
    assert {where.rpartition(".")[2] for where in by_class} == {"scores", "method"}  # the predicted class names a group of images
    assert set(read) == {*of_one_image, *by_class}, read  # selecting one image writes its target without the others'


@pytest.mark.parametrize("method", ["rollout", "attention", "captum.saliency"])
def test_a_picture_does_not_depend_on_its_provenance(method: str) -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8))
    found = visattn.explain(tiny.vit(), photo, method=method)
    bare = replace(found, map=replace(found.map, provenance=Provenance(versions={})))
    assert bare.overlay(mass=0.5 if method != "captum.saliency" else None).tobytes() == (
        found.overlay(mass=0.5 if method != "captum.saliency" else None).tobytes()
    )
