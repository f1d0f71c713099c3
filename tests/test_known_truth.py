"""Script that compares maps with scenes: its tables equal the metrics, network by network."""

from __future__ import annotations

import csv
import importlib
import itertools
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import visattn
from visattn import evaluation
from visattn._support.tables import to_markdown
from visattn.core.geometry import Box, Geometry
from visattn.core.loading import model_folders as folders
from visattn.core.loading.blueprints import Blueprint
from visattn.core.maps import AttentionMap
from visattn.core.records import TokenLayout
from visattn.data.scenes import CLASSES, Scenes
from visattn.errors import OptionError
from visattn.evaluation.intervals import mean_interval
from visattn.nn import CBAM

ROOT = Path(__file__).parents[1]
COUNT = 2


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("known_truth")
    monkeypatch.setattr(module, "mean_interval", partial(mean_interval, resamples=20))  # bounds of intervals are not tested
    return module


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for seed, name in enumerate(("scenes_cnn", "scenes_cnn_shortcut")):
        torch.manual_seed(seed)
        statistics = (0.5,) * 3, (0.2,) * 3
        blueprint = Blueprint(
            "visattn_resnet14", CLASSES, 3, (64, 64), *statistics, attention="cbam", options={"widths": (4, 8, 16)}
        )
        folders.save(blueprint.build(), blueprint, tmp_path / name)
    return tmp_path


def table_of(text: str, title: str = "") -> dict[str, dict[str, str]]:
    """Return the first table below a title, as rows by their first cell."""
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


def test_table_of_a_network_equals_the_metrics_of_its_maps(script: ModuleType, checkpoints: Path) -> None:
    text = script.section(script.NETWORKS["scenes_cnn"], checkpoints, COUNT, 0).text
    model, scenes = visattn.load_model(str(checkpoints / "scenes_cnn")), Scenes(COUNT, seed=script.SEED)
    found = []
    for index in range(COUNT):
        scene = scenes.scene(index)
        one = visattn.explain(model, Image.fromarray(scene.image), method="hirescam", target=scene.label)
        found.append([float(metric(one.map, scene.masks[0], one.geometry)) for metric in (evaluation.auroc, evaluation.lift)])
    rows = table_of(text)
    assert [mean_of(rows["hirescam"][name]) for name in ("AUROC", "lift")] == pytest.approx(np.mean(found, 0), abs=0.005)
    assert {"gradcam", "cam", "gates of layer3.1.attention"} <= set(rows)
    assert not rows["cam"].get("lift")  # it has both signs
    assert all(row["scenes"] == str(COUNT) for row in rows.values())
    assert set(table_of(text, "The same maps")) == set(rows)
    itself = table_of(text, "Controls")["object mask at the map's resolution"]
    assert mean_of(itself["AUROC"]) > 0.95
    assert "attention" in text[text.index("Not applicable") :]
    quick = {"captum.saliency", "captum.input_x_gradient"}  # the others run the model many times
    assert {name for name in rows if name.startswith("captum")} == quick


@pytest.mark.full
def test_watermark_results_are_compared_with_its_area_and_the_plain_network(script: ModuleType, checkpoints: Path) -> None:
    text = script.section(script.NETWORKS["scenes_cnn_shortcut"], checkpoints, COUNT, 0).text
    assert f"The mark covers {81 / 64**2:.1%} of the image." in text
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
                shares.append(float(evaluation.energy_inside(one.map, scene.watermark, one.geometry)))
    assert "unmarked scenes with the gates of their marked copies" in text
    row = table_of(text)["layercam"]
    assert mean_of(row["AUROC of the mark"]) == pytest.approx(np.mean(found["scenes_cnn_shortcut"]), abs=0.005)
    without = mean_of(row["AUROC of the mark, network trained without it"])
    assert without == pytest.approx(np.mean(found["scenes_cnn"]), abs=0.005)
    assert mean_of(row["share of the map on the mark"]) == pytest.approx(100 * np.mean(shares), abs=0.05)


def test_updating_a_table_changes_only_its_section_of_the_page(script: ModuleType) -> None:
    docs = importlib.import_module("pages")
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
    with pytest.raises(SystemExit, match=r"page\.md: must contain the marks <!-- scenes_cnn --> and <!-- end --> exactly once"):
        docs.with_section("no marks", "scenes_cnn", "x", "page.md")


def test_map_exceeds_another_only_if_the_full_interval_does(script: ModuleType) -> None:
    values = np.array([0.6, 0.7, 0.8, 0.9])
    assert script.exceeds(values, values - 0.1)
    assert not script.exceeds(values, values[::-1])
    assert not script.exceeds(values, values)


@pytest.mark.parametrize("arguments", [["--scenes", "1"], ["--slow-scenes", "1"], ["--only", "nothing"]], ids=" ".join)
def test_invalid_arguments_are_refused(
    arguments: list[str], script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["known_truth.py", *arguments])
    with pytest.raises(SystemExit):
        script.main()
    assert "two scenes or more are needed" in capsys.readouterr().err


def section(name: str) -> str:
    page: str = (ROOT / "docs" / "known_truth.md").read_text(encoding="utf-8")
    return page.split(f"<!-- {name} -->")[1].split("<!-- end -->")[0]


def rows_by(text: str, column: str) -> dict[str, dict[str, str]]:
    """Return the table whose first column has this title."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
    first = next(i for i, cells in enumerate(lines) if cells[0] == column)
    rows = itertools.takewhile(lambda cells: len(cells) > 1, lines[first + 2 :])
    return {cells[0]: dict(zip(lines[first], cells, strict=False)) for cells in rows}


def rows_of(name: str) -> dict[str, dict[str, str]]:
    """Return the rows of a file, by their first cell."""
    with (ROOT / "docs" / "known_truth" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return {next(iter(row.values())): row for row in csv.DictReader(file)}


def scores_of(name: str) -> dict[str, dict[str, str]]:
    """Return the rows of the file with the scores of a network's maps, by map."""
    return rows_of(f"{name}_scores_of_maps")


def test_large_tables_go_into_files_that_the_page_links(script: ModuleType, tmp_path: Path) -> None:
    docs, page = importlib.import_module("pages"), tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- some -->\n<!-- end -->\n")
    rows: list[dict[str, str | None]] = [{"map": "a, b", "value": "1 | 2"}, {"map": 'with "quotes"', "value": None}]
    small, large = to_markdown(rows[:1]), docs.folded("Scores of 2 maps, each", to_markdown(rows))
    docs.write_section(page, "some", f"{small}\n{large}", into_files=True)
    assert page.read_text() == (
        f"# Title\n\n<!-- some -->\n\n{small}\n- [Scores of 2 maps, each](page/some_scores_of_maps.csv)\n\n<!-- end -->\n"
    )
    with (tmp_path / "page" / "some_scores_of_maps.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{name: value or "" for name, value in row.items()} for row in rows]


def test_text_about_grad_cam_and_the_mark_agrees_with_the_tables() -> None:
    marks, layers = scores_of("scenes_cnn_shortcut")["gradcam"], rows_of("scenes_cnn_shortcut_grad-cam_of_each_layer")
    last = layers["layer3"]
    told = " ".join((ROOT / "docs" / "known_truth.md").read_text(encoding="utf-8").split("## The scenes")[0].split())
    for sentence in (
        f"{marks['share of the map on the mark'].split(' (')[0].replace('%', ' %')} of its mass is on the mark",
        f"(AUROC {marks['AUROC of the object'].split(' (')[0]})",
        f"The AUROC of the mark is below chance, {last['AUROC of the mark'].split(' (')[0]}",
        f"holds {last['marked corner'].split(' (')[0]} times the map's mean, the other three {last['other corners'].split(' (')[0]}, "
        f"the inside {last['inside'].split(' (')[0]}",
        f"the AUROC is {last['AUROC after subtracting the mean map'].split(' (')[0]}",
        f"In {mean_of(last['largest cell touches the mark']):.0f} % of the scenes it is one of the three beside it",
        f"(in {mean_of(last['the same cells without a mark'])} % without a mark)",
        f"touches the mark in {mean_of(layers['layer1']['largest cell touches the mark']):.0f} % and "
        f"{mean_of(layers['layer2']['largest cell touches the mark']):.0f} %",
    ):
        assert sentence in told
    assert mean_of(last["largest cell: center on the mark"]) == 0  # the maximum is never in the corner
    gates = {
        name: list(row.values())[1:] for name, row in rows_of("scenes_cnn_shortcut_accuracy_after_an_exchange_of_gates").items()
    }
    whole, chance = gates["channel"][2:]
    assert gates == {"channel": [chance, whole, whole, chance], "spatial": [whole, chance, whole, chance]}
    assert f"{whole} with the mark of the class, {chance} without a mark" in section("scenes_cnn_shortcut")
    low, high = f"{mean_of(chance):.0f} %", f"{mean_of(whole):.0f} %"
    assert f"{low} correct instead of {high}. The reverse: {high} instead of {low}." in told
    page = " ".join((ROOT / "docs" / "choosing_a_method.md").read_text(encoding="utf-8").split())
    each = [f"{mean_of(layers[name]['largest cell touches the mark']):.0f}" for name in ("layer1", "layer2")]
    assert f"its largest cell touches the mark in {each[0]} and {each[1]} of 100 scenes" in page


def test_first_table_states_the_means_of_the_tables_below() -> None:
    rows = rows_by(section("summary"), "method")
    assert len(rows) == 10
    for name, column in (("scenes_cnn", "object, CNN"), ("scenes_vit", "object, ViT")):
        below = scores_of(name)
        assert {method: row[column].rstrip("*") for method, row in rows.items() if row[column]} == {
            method: below[method]["AUROC"].split()[0] for method in rows if method in below
        }
    for name, column in (("scenes_cnn_shortcut", "mark, CNN"), ("scenes_vit_shortcut", "mark, ViT")):
        below = scores_of(name)
        assert {method: row[column].rstrip("*") for method, row in rows.items() if row[column]} == {
            method: below[method]["AUROC of the mark"].split()[0] for method in rows if method in below
        }


def test_every_method_that_needs_only_pixels_applies(script: ModuleType, checkpoints: Path) -> None:
    measure = importlib.import_module("truth.measure")
    model, scene = visattn.load_model(str(checkpoints / "scenes_cnn")), Scenes(1, seed=script.SEED).scene(0)
    ways = {
        name: way for name, way in measure.ways_of(model, scene).items() if name.startswith("captum.") or name.endswith("cam")
    }
    for name in ("captum.kernel_shap", "captum.lime"):
        ways[name] = measure.Way(name, {"samples": 60})
    kept, refused = measure.applicable(ways, model, scene)
    assert refused == ()
    assert {"scorecam", "ablationcam", "captum.occlusion", "captum.lime"} <= kept.keys()


def test_a_wrong_parameter_is_a_fault_of_the_script(
    script: ModuleType, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = importlib.import_module("truth.measure")
    monkeypatch.setitem(measure.PARAMETERS, "scorecam", {"batches": 64})
    model, scene = visattn.load_model(str(checkpoints / "scenes_cnn")), Scenes(1, seed=script.SEED).scene(0)
    with pytest.raises(OptionError, match="method 'scorecam' has no parameter 'batches'"):
        measure.ways_of(model, scene)


def test_a_star_needs_both_controls(script: ModuleType) -> None:
    def measured(values: list[float]) -> object:
        row = script.Measured((2, 2))
        for truth in ("object", "mark"):
            row.numbers[truth]["AUROC"] = values
        return row

    high, middle, low = ([base + step for step in (0.0, 0.01, 0.02)] for base in (0.8, 0.5, 0.2))
    for moved, control, above in ((low, middle, True), (low, high, False), (high, low, False)):
        references = {f"{script.PRIOR}, 2 x 2": measured(control)}
        found = script.Measures({"gradcam": measured(high)}, {"gradcam": measured(moved)}, references, ())
        plain = script.Result("", found, None)
        twin = script.Result("", found, script.Measures({"gradcam": measured(control)}, {}, {}, ()))
        assert [script.compared(one, "gradcam").above for one in (plain, twin)] == [above, above]
    assert script.compared(plain, "rollout") is None
    assert script.summary({"scenes_cnn": plain}).splitlines()[2] == "| gradcam | 0.81 |"


def test_the_mean_of_the_other_maps_is_subtracted(script: ModuleType) -> None:
    values = np.random.default_rng(0).random((4, 2, 3))
    layout = TokenLayout("tokens", (), (2, 3), Box(0, 0, 20, 30))
    maps = [AttentionMap(torch.from_numpy(one), (), layout, {}, "x") for one in values]
    for index, one in enumerate(importlib.import_module("truth.measure").without_the_mean(maps)):
        rest = [values[other] for other in range(4) if other != index]
        assert np.allclose(one.numpy(), values[index] - sum(rest) / 3)


def test_numbers_for_choosing_a_method_agree_with_the_tables() -> None:
    page = (ROOT / "docs" / "choosing_a_method.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `([\w.]+)`(?: \((\d+) scenes\))? \| (ViT|CNN) \| ([\d.]+) \| ([\d.]+) \|(?: ([\d.]+%))? \|$", page, re.MULTILINE
    )
    assert len(rows) == 7
    for method, scenes, kind, found, marked, share in rows:
        plain, shortcut = (scores_of(f"scenes_{kind.lower()}{end}")[method] for end in ("", "_shortcut"))
        assert plain["AUROC"].split()[0] == found
        assert shortcut["AUROC of the mark"].split()[0] == marked
        assert shortcut["share of the map on the mark"].split()[:1] == ([share] if share else [])
        assert plain["scenes"] == shortcut["scenes"] == (scenes or "100")
    for number, row in (("3.64", "last layer, mean of heads"), ("1.78", "rollout from layer 0"), ("1.77", "center prior")):
        assert number in page
        assert f"| {row} | {number} |" in (ROOT / "docs" / "localization.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["scenes_cnn", "scenes_vit"])
def test_text_states_how_many_maps_are_above_chance(name: str) -> None:
    listed = re.findall(r"^- (Above [\w ]+): (.*)\.$", section(name), re.MULTILINE)
    # names of gates and methods contain no comma, but "gradcam, last block" does
    counts = {kind: len(names.replace(", last block", "").split(", ")) for kind, names in listed}
    of = {"scenes_cnn": "the CNN", "scenes_vit": "the ViT"}[name]
    above = counts["Above both its shifted copies and the center prior"]
    assert f"{above} of {sum(counts.values())} maps of {of}" in (ROOT / "docs" / "known_truth.md").read_text(encoding="utf-8")


class Gated(nn.Module):
    """Model with only the gates of a CBAM: the largest channel, or the largest half."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.gate, self.part = CBAM(3, width=3, kernel_size=1), part
        with torch.no_grad():
            for parameter in self.gate.parameters():
                parameter.zero_()
            if part == "channel":
                for layer in (self.gate.fc1, self.gate.fc2):
                    layer.weight.copy_(torch.eye(3)[..., None, None])
                self.gate.fc2.bias.fill_(-5)  # type: ignore[union-attr]
            else:
                self.gate.conv.weight.copy_(torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))
                self.gate.norm.weight.fill_(1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        share: torch.Tensor = self.gate(pixels + 5) / (pixels + 5)
        if self.part == "channel":
            return share.mean((2, 3))
        left, right = share.mean(1).chunk(2, 2)
        return torch.stack([left.mean((1, 2)), right.mean((1, 2))], 1)


@pytest.mark.parametrize("part", ["channel", "spatial"])
def test_exchanging_gates_exchanges_the_predictions(part: str, script: ModuleType) -> None:
    first, second = Image.new("RGB", (64, 64), "black"), Image.new("RGB", (64, 64), "black")
    whole = (0, 0, 64, 64)
    first.paste("red", whole if part == "channel" else (0, 0, 32, 64))
    second.paste("lime", whole if part == "channel" else (32, 0, 64, 64))
    ours, others, model = [(first, 0)] * 3, [(second, 1)] * 3, Gated(part).eval()
    before = {name: dict(module._forward_hooks) for name, module in model.named_modules()}
    for which in ("channel", "spatial"):
        assert script.exchanged(model, ours, ours, which) == 1
        kept = 0 if which == part else 1
        assert script.exchanged(model, ours, others, which) == script.exchanged(model, others, ours, which) == kept
    assert {name: dict(module._forward_hooks) for name, module in model.named_modules()} == before


def test_the_largest_cell_touches_a_mark_that_reaches_into_it(script: ModuleType) -> None:
    measure = importlib.import_module("truth.measure")
    mask = np.zeros((64, 64), bool)
    mask[1:10, 1:10] = True
    place = Geometry((64, 64), (64, 64), Box(0, 0, 64, 64))
    for cell, expected in (((0, 0), 1), ((1, 1), 1), ((0, 1), 1), ((2, 0), 0), ((7, 7), 0)):
        values = torch.zeros(2, 8, 8)
        values[:, cell[0], cell[1]] = 1
        values[1, 7, 7] = 1  # the second map has two maxima
        made = AttentionMap(values, ("copy",), TokenLayout("map", (), (8, 8), Box(0, 0, 64, 64)), {}, "votes")
        assert measure.touches(made, mask, place).tolist() == [expected, expected / 2 if cell != (7, 7) else 0]


def test_layers_of_a_network_are_measured_scene_by_scene(script: ModuleType, checkpoints: Path) -> None:
    model = visattn.load_model(str(checkpoints / "scenes_cnn_shortcut"))
    marked, plain = (Scenes(COUNT, (64, 64), seed=script.SEED, watermark=mark) for mark in ("label", "none"))
    (seen,) = script.layer_by_layer(model, ["layer2"], marked, plain).values()
    maps = []
    for index in range(COUNT):
        scene = marked.scene(index)
        maps.append(visattn.explain(model, Image.fromarray(scene.image), method="gradcam", target=scene.label, layer="layer2"))
    for index, found in enumerate(maps):
        values, mask = found.map.values.double().numpy(), marked.scene(index).watermark
        height = 64 // values.shape[0]
        cells = {(y // height, x // height) for y, x in zip(*mask.nonzero(), strict=True)}
        last = values.shape[0] - 1
        mean = values.mean()
        corner = np.mean([values[cell] for cell in cells])
        others = [
            np.mean([values[last - y if down else y, last - x if across else x] for y, x in cells])
            for down, across in ((True, False), (False, True), (True, True))
        ]
        numbers = {name: each[index] for name, each in seen.numbers.items()}
        assert numbers["marked corner"] == pytest.approx(corner / mean, rel=1e-5)
        assert numbers["other corners"] == pytest.approx(np.mean(others) / mean, rel=1e-5)
        assert numbers["inside"] == pytest.approx(values[1:-1, 1:-1].mean() / mean, rel=1e-5)
        unlike = replace(found.map, values=found.map.values - maps[1 - index].map.values)
        assert numbers["without the mean map"] == pytest.approx(float(evaluation.auroc(unlike, mask, found.geometry)))
        assert numbers["touches"] == float(np.unravel_index(values.argmax(), values.shape) in cells)
