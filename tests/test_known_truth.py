"""The script that holds maps against scenes: what it prints is what the metrics give, network by network."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

import visattn
from visattn import evaluation
from visattn._bootstrap import mean_interval
from visattn.data.scenes import CLASSES, Scenes
from visattn.families import trained

ROOT = Path(__file__).parents[1]
COUNT = 2


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("known_truth")
    monkeypatch.setattr(module, "mean_interval", partial(mean_interval, resamples=20))  # ends of intervals are not looked at
    return module


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for seed, name in enumerate(("scenes_cnn", "scenes_cnn_shortcut")):
        torch.manual_seed(seed)
        statistics = (0.5,) * 3, (0.2,) * 3
        blueprint = trained.Blueprint(
            "visattn_resnet14", CLASSES, 3, (64, 64), *statistics, attention="cbam", options={"widths": (4, 8, 16)}
        )
        trained.save(blueprint.build(), blueprint, tmp_path / name)
    return tmp_path


def table_of(text: str, title: str = "") -> dict[str, dict[str, str]]:
    """The first table behind a title: its rows by their first cell."""
    lines = [line.strip("| ").split(" | ") for line in text[text.index(title) :].splitlines()]
    first = next(i for i, cells in enumerate(lines) if cells[0] == "map")
    rows = {}
    for cells in lines[first + 2 :]:
        if len(cells) < 2:
            break
        rows[cells[0]] = dict(zip(lines[first], cells, strict=False))
    return rows


def mean_of(cell: str) -> float:
    return float(cell.split(" (")[0].rstrip("%"))


def test_figures_of_a_network_are_those_of_its_maps(script: ModuleType, checkpoints: Path) -> None:
    text = script.section(script.NETWORKS["scenes_cnn"], checkpoints, COUNT, 0)
    model, scenes = visattn.load_model(str(checkpoints / "scenes_cnn")), Scenes(COUNT, seed=script.SEED)
    found = []
    for index in range(COUNT):
        scene = scenes.scene(index)
        one = visattn.explain(model, Image.fromarray(scene.image), method="hirescam", target=scene.label)
        found.append([float(metric(one.map, scene.masks[0], one.geometry)) for metric in (evaluation.auroc, evaluation.lift)])
    rows = table_of(text)
    assert [mean_of(rows["hirescam"][name]) for name in ("AUROC", "lift")] == pytest.approx(np.mean(found, 0), abs=0.005)
    assert {"gradcam", "cam", "gates of layer3.1.attention"} <= set(rows)
    assert not rows["cam"].get("lift")  # of both signs
    assert all(row["scenes"] == str(COUNT) for row in rows.values())
    assert set(table_of(text, "The same maps")) == set(rows)
    itself = table_of(text, "What knows nothing")["the mask itself, in cells of the grid"]
    assert mean_of(itself["AUROC"]) > 0.95
    assert "attention" in text[text.index("Do not apply") :]
    assert "captum" not in text


def test_watermark_is_told_beside_its_area_and_the_network_that_never_saw_one(script: ModuleType, checkpoints: Path) -> None:
    text = script.section(script.NETWORKS["scenes_cnn_shortcut"], checkpoints, COUNT, 0)
    assert f"The mark covers {81 / 64**2:.1%} of the picture." in text
    found = {"scenes_cnn": [0.0], "scenes_cnn_shortcut": [0.0]}
    scenes, shares = Scenes(COUNT, seed=script.SEED, watermark="label"), []
    for name, values in found.items():
        model = visattn.load_model(str(checkpoints / name))
        values.clear()
        for index in range(COUNT):
            scene = scenes.scene(index)
            one = visattn.explain(model, Image.fromarray(scene.image), method="layercam", target=scene.label)
            values.append(float(evaluation.auroc(one.map, scene.watermark, one.geometry)))
            if name == "scenes_cnn_shortcut":
                shares.append(float(evaluation.mass_on(one.map, scene.watermark, one.geometry)))
    row = table_of(text)["layercam"]
    assert mean_of(row["AUROC of the mark"]) == pytest.approx(np.mean(found["scenes_cnn_shortcut"]), abs=0.005)
    without = mean_of(row["of the network without a watermark: AUROC of the mark"])
    assert without == pytest.approx(np.mean(found["scenes_cnn"]), abs=0.005)
    assert mean_of(row["share of the map on the mark"]) == pytest.approx(100 * np.mean(shares), abs=0.05)


def test_pages_have_a_place_for_each_table_and_nothing_else_changes(script: ModuleType) -> None:
    docs = importlib.import_module("_docs")
    captions = script.ROOT / "docs" / "captions.md"
    for file, names in ((script.DOCS, list(script.NETWORKS)), (captions, ["said", "looked", "estimator", "glimpses"])):
        page = file.read_text(encoding="utf-8")
        for name in names:
            once = docs.with_section(page, name, "| a \\1 | table |", "page")
            assert f"<!-- {name} -->\n\n| a \\1 | table |\n<!-- end -->" in once
            assert docs.with_section(once, name, "x", "page") == docs.with_section(page, name, "x", "page")
            assert [line for line in page.splitlines() if line.startswith("#")] == [
                line for line in once.splitlines() if line.startswith("#")
            ]
    with pytest.raises(SystemExit, match=r"page\.md: must hold the marks <!-- scenes_cnn --> and <!-- end --> once"):
        docs.with_section("no marks", "scenes_cnn", "x", "page.md")


def test_map_is_above_another_where_the_whole_interval_is(script: ModuleType) -> None:
    values = np.array([0.6, 0.7, 0.8, 0.9])
    assert script.exceeds(values, values - 0.1)
    assert not script.exceeds(values, values[::-1])
    assert not script.exceeds(values, values)


@pytest.mark.parametrize("arguments", [["--scenes", "1"], ["--slow-scenes", "1"], ["--only", "nothing"]], ids=" ".join)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["known_truth.py", *arguments])
    with pytest.raises(SystemExit):
        script.main()
    assert "two scenes or more are needed" in capsys.readouterr().err
