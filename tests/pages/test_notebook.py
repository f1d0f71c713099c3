"""Notebooks: the last line of a cell shows a picture, and reprs are short."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

import visattn
from visattn import data
from visattn.core.drawing.style_options import StyleOptions
from visattn.core.pipeline.question import ask
from visattn.core.pipeline.targets import Target
from visattn.data import scenes
from visattn.errors import OptionError, OutputError
from visattn.evaluation import statistics

CELLS = {  # the last line of each shows a picture
    "explanation": "import visattn\nexplanation = visattn.explain('scenes_vit', 'scene:7')\nexplanation",
    "show": "explanation.show(opacity=0.7)",
    "overlay": "explanation.overlay(blend='value')",
    "heads": "heads = visattn.explain('scenes_vit', 'scene:7', method='attention')\nheads.contact_sheet()",
    "one head": "heads.at(head=1)",
    "heatmap by hand": "visattn.overlay(heads.photo, heads.at(head=0).heatmap())",
    "again": "explanation.save('again.png')\nexplanation.save('again.png')\nexplanation",
}


@pytest.mark.full
def test_last_lines_of_cells_show_pictures(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()])
    client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for name, cell in zip(CELLS, notebook.cells, strict=True):
        shown = [output.data for output in cell.outputs if "data" in output]
        encoded = [data[kind] for data in shown for kind in ("image/png", "image/jpeg") if kind in data]
        assert len(encoded) == 1, name  # a notebook stores what it is given
        picture = Image.open(io.BytesIO(base64.b64decode(encoded[0])))
        assert min(picture.size) >= 224, name
        assert not [output for output in cell.outputs if output.output_type == "error"], name
    assert (tmp_path / "again.png").exists()


@pytest.fixture(scope="module")
def found() -> visattn.Explanation:
    explanation: visattn.Explanation = visattn.explain("scenes_vit", "scene:7", method="attention")
    return explanation


def test_reprs_are_short(found: visattn.Explanation) -> None:
    model = visattn.load_model("scenes_vit")
    prepared = visattn.prepare("scene:7", model)
    with visattn.capture(model, values=True, features="all") as recording:
        model(prepared.pixels)
    survey = visattn.Survey(model)
    survey.add(prepared.photo, "scene")
    things: list[Any] = [
        found,
        found.map,
        found.provenance,
        found.geometry,
        found.heatmap(),
        found.overlay(),
        found.map.layout,
        found.map.facts,
        prepared,
        recording,
        recording[0],
        recording.features[0],
        recording[0].operator,
        next(iter(recording[0].operator.tiles())),
        survey,
        visattn.Preprocessing(),
        visattn.families.input_spec(model),
        visattn.methods.METHODS["rollout"],
        visattn.methods.METHODS,
        Target(3, labels=tuple(f"a long name of a class {number}" for number in range(1000))),
        ask("rollout"),
        scenes.Scenes(3),
        scenes.Scenes(3).scene(1),
        data.load_labeled("scenes", "test", count=8),
        *statistics(recording),
    ]
    assert {type(thing).__name__: len(repr(thing)) for thing in things if len(repr(thing)) > 400} == {}
    for thing in things:
        if dataclasses.is_dataclass(thing):
            assert type(thing).__name__ in repr(thing)


def test_repr_and_caption_say_what_is_shown(found: visattn.Explanation) -> None:
    one = found.at(head=1)
    assert "layer blocks.3.attn, head 1, query mean" in repr(one)
    assert one.provenance.parameters["head"] == 1
    assert "for ring, " in repr(visattn.explain("scenes_vit", "scene:7", target="ring"))
    layers = visattn.explain("scenes_vit", "scene:7", method="attention", layer="all").at(layer=2)
    assert (layers.map.facts.layer, layers.provenance.parameters["layer"]) == ("blocks.2.attn", "blocks.2.attn")
    shown = one._repr_html_()
    assert shown.startswith('<figure><img src="data:image/jpeg;base64,')
    assert "layer blocks.3.attn, head 1, query mean</figcaption>" in shown  # that layer has no sink
    told = layers.at(head=1)._repr_html_()
    assert "layer blocks.2.attn, head 1, query mean<br>rings: cyan, a sink<br><b>warning: 1 sink receives many times" in told
    small = one.overlay()
    assert (small._repr_png_() or b"").startswith(b"\x89PNG")
    assert small._repr_jpeg_() is None
    large = visattn.explain("scenes_vit", "photo:coffee").overlay()
    assert (large._repr_jpeg_() or b"").startswith(b"\xff\xd8")
    assert large._repr_png_() is None


def test_maps_heatmaps_and_studies_show_pictures(found: visattn.Explanation) -> None:
    for thing, sides in ((found.map, None), (found.at(head=0).map, None), (found.at(head=0).heatmap(), found.photo.size)):
        picture = Image.open(io.BytesIO(thing._repr_png_() or b""))
        assert np.asarray(picture.convert("RGB")).std() > 10
        assert sides is None or picture.size == sides
    assert found.map.to_heatmap(found.geometry)._repr_png_() is None  # of several heads
    assert visattn.explain("scenes_vit", "scene:7", method="pca").map._repr_png_() is None
    study = visattn.study("scenes_vit", ["scene:7", "scene:8"])
    shown = study._repr_html_()
    assert shown.count('<img src="data:image/jpeg;base64,') == 2
    assert "ViT-C on scene:7<br>maps: rollout" in shown
    assert len(shown) < 50_000


def test_caption_explains_rings_only_if_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[str]] = []

    def captioned(picture: Image.Image, lines: list[str], _bar: object) -> Image.Image:
        written.append(lines)
        return picture

    monkeypatch.setattr("visattn.core.drawing.pages.captioned", captioned)
    with_sink, without = (visattn.explain("scenes_vit", "scene:7", method="attention", layer=layer, head=1) for layer in (2, 3))
    for options in (StyleOptions(), StyleOptions(marks=False), StyleOptions(opacity=1.0)):
        with_sink.overlay(caption=True, **options)
    without.overlay(caption=True)
    assert ["rings: cyan, a sink" in lines for lines in written] == [True, False, False, False]


def test_caption_tells_the_part_that_the_model_received() -> None:
    wide = Image.new("RGB", (300, 100), "gray")
    shown = visattn.explain("scenes_vit", wide, method="attention", resize="model").at(head=0)._repr_html_()
    assert "the model received 100 x 100 of 300 x 100 pixels" in shown


def test_values_are_arrays(found: visattn.Explanation) -> None:
    values = found.map.values.numpy()
    for one in (found, found.map):
        assert np.array_equal(one.numpy(), values)
        assert np.array_equal(np.asarray(one), values)
        assert np.asarray(one, dtype=np.float64).dtype == np.float64
    heat = found.at(head=0).heatmap()
    assert np.array_equal(np.asarray(heat), heat.values)
    assert torch.equal(torch.as_tensor(np.asarray(found)), found.map.values)


@pytest.mark.parametrize(("name", "kind"), [("a.png", "PNG"), ("a.jpg", "JPEG"), ("a.JPEG", "JPEG"), ("a.webp", "WEBP")])
def test_save_writes_the_format_of_the_ending_with_provenance(
    found: visattn.Explanation, name: str, kind: str, tmp_path: Path
) -> None:
    path = found.save(tmp_path / "new" / name)
    assert found.save(path) == path  # a cell runs again
    with Image.open(path) as picture:
        assert picture.format == kind
        text = picture.info["visattn"] if kind == "PNG" else picture.getexif()[ExifTags.Base.ImageDescription]
    assert json.loads(text)["method"] == "attention"
    with pytest.raises(OutputError, match="exists already"):
        found.save(path, overwrite=False)


def test_an_unknown_ending_is_refused(found: visattn.Explanation, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"x\.tif: pictures are written as \.png, \.jpg, \.jpeg, \.webp"):
        found.save(tmp_path / "x.tif")
    assert not list(tmp_path.iterdir())


def test_provenance_travels_with_the_picture(found: visattn.Explanation) -> None:
    picture = found.overlay()
    for one in (picture, picture.copy(), picture.resize((50, 50)), picture.crop((0, 0, 9, 9))):
        assert json.loads(one.info["visattn"])["method"] == "attention"
    assert "visattn" not in found.photo.info


def test_map_is_saved_and_loaded(found: visattn.Explanation, tmp_path: Path) -> None:
    loaded = visattn.load_map(found.save_map(tmp_path / "map.npz"))
    assert isinstance(loaded, tuple)
    assert torch.equal(loaded[0].values, found.map.values)
    assert loaded[1] == found.geometry


@pytest.mark.parametrize("method", ["attention", "relevance"])
def test_contact_sheet_has_a_panel_for_each_head(method: str) -> None:
    explanation = visattn.explain("scenes_vit", "scene:7", method=method)
    if method == "attention":
        assert explanation.contact_sheet().width > 2 * 224
    else:
        with pytest.raises(OptionError, match="a contact sheet needs one or two axes"):
            explanation.contact_sheet()
