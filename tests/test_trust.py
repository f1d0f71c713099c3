"""Scripts of the page on trust: their tables beside scipy and loops, on few scenes and methods."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import rankdata, spearmanr

import visattn
from visattn.data.scenes.causes import CausedScenes
from visattn.evaluation import Evaluation, MapNumbers, auroc
from visattn.evaluation.causes.networks import cause_networks

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
SCENES = 3
FEW = "gradcam", "eigencam", "captum.input_x_gradient"


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = importlib.import_module("trust")
    whole = script.ways_of
    chosen = *FEW, "captum.occlusion"
    monkeypatch.setattr(script, "ways_of", lambda *given: {name: way for name, way in whole(*given).items() if name in chosen})
    return script


def test_tables_of_a_network(trust: ModuleType, tmp_path: Path) -> None:
    network = next(one for one in cause_networks() if one.name == "mark_cnn_0")
    ways, stem = trust.ways_that_apply(network), tmp_path / "mark_cnn_0"
    groups = trust.measured(network, ways, SCENES, stem)
    quick = groups["quick"]
    assert groups["every"]["saco"].maps == (*FEW, *trust.BESIDE, "captum.occlusion")
    assert set(quick) == {*trust.RANKING, *trust.COSTLY, trust.STABLE, "auroc"}
    maps, numbers = quick["auroc"]
    assert maps == (*FEW, *trust.BESIDE)
    scenes = CausedScenes("mark", SCENES, seed=trust.SEED)
    for place in range(SCENES):
        scene = scenes.scene(place)
        prepared = visattn.prepare(scene.image, network.model)
        label = int(network.model(prepared.pixels).argmax())
        found = visattn.explain(network.model, scene.image, method="gradcam", target=label)
        assert numbers[place, 0] == pytest.approx(float(auroc(found.panel, scene.masks[0], found.geometry)))
        assert numbers[place, maps.index("truth")] == 1
    rows = {row["metric"]: row for row in trust.rows_of("mark_cnn_0", quick)}
    saco = quick["saco"].numbers
    ranks = np.stack([rankdata(-row) for row in saco]).mean(0)
    assert rows["saco"]["rank of truth"][0] == pytest.approx(ranks[maps.index("truth")])
    order = spearmanr(saco.mean(0)[:3], numbers.mean(0)[:3]).statistic
    assert rows["saco"]["order of the cause"][0] == pytest.approx(order)
    lower = quick["deletion"].numbers.mean(0)
    assert rows["deletion"]["methods above the truth"] == int((lower[:3] < lower[maps.index("truth")]).sum())
    again = trust.measured(network, ways, SCENES, stem)["quick"]
    assert all(np.array_equal(again[name].numbers, quick[name].numbers) for name in quick)
    (line, *_) = trust.summary(list(trust.rows_of("mark_cnn_0", quick)))
    assert line["truth first in"] in ("0 of 1", "1 of 1")


def test_rows_are_kept_for_the_same_settings(trust: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = next(one for one in cause_networks() if one.name == "mark_cnn_0")
    found = trust.found_of(network, SCENES, tmp_path)
    assert {row["metric"] for row in found.rows["every"]} == {*trust.RANKING, *trust.COSTLY}
    assert "(" in trust._told_row(found.rows["quick"][0])["rank of truth"]
    whole = trust.measured
    monkeypatch.setattr(trust, "measured", None)
    assert trust.found_of(network, SCENES, tmp_path) == found
    monkeypatch.setattr(trust, "measured", whole)
    monkeypatch.setattr(trust, "FEW", 2)
    again = trust.found_of(network, 2, tmp_path / "other")
    assert {row["scenes"] for row in again.rows["quick"]} == {2}


def test_journals_of_other_settings_are_others(trust: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = next(one for one in cause_networks() if one.name == "mark_cnn_0")
    before = trust.found_of(network, 2, tmp_path)
    monkeypatch.setattr(trust, "CELLS", (4, 4))
    after, fresh = (trust.found_of(network, 2, folder) for folder in (tmp_path, tmp_path / "other"))
    assert after == fresh
    assert after != before


def test_one_network_of_each_cause_and_kind_is_measured(trust: ModuleType) -> None:
    networks = trust.first_networks(1)
    assert len({(one.cause, one.kind) for one in networks}) == len(networks) >= 12
    assert all((one.folder / "model.safetensors").exists() for one in networks)


def test_maps_are_pooled_to_means(trust: ModuleType) -> None:
    geometry = visattn.prepare("scene:7", visattn.load_model("scenes_vit")).geometry
    side = geometry.input[0]
    values: NDArray[np.float64] = np.random.default_rng(0).random((side, side))
    pooled = trust.pooled(lambda: values, geometry)
    for row in range(8):
        for column in range(8):
            part = values[row * side // 8 : (row + 1) * side // 8, column * side // 8 : (column + 1) * side // 8]
            assert pooled[row, column] == pytest.approx(part.mean())


def test_only_maps_with_all_numbers_are_ranked(trust: ModuleType) -> None:
    numbers = [
        MapNumbers(place, "", "", name, {"saco": float("nan") if (place, name) == (1, "b") else place + 0.5}, {})
        for place in range(3)
        for name in "ab"
    ]
    table = trust._table(Evaluation(numbers, ["saco"]), "saco")
    assert table.maps == ("a",)
    assert table.numbers.tolist() == [[0.5], [1.5], [2.5]]


def test_no_order_is_above_the_truth_by_deletion(trust: ModuleType) -> None:
    shares = trust.orders_above(2, 50)
    assert shares["deletion"] == 0
    assert 0 <= shares["road"] < 0.5


def test_sanity_lists_methods_that_do_not_depend_on_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sanity: Any = importlib.import_module("sanity")
    whole = sanity.ways_of
    monkeypatch.setattr(sanity, "ways_of", lambda *given: {name: way for name, way in whole(*given).items() if name in FEW})
    text = sanity.section("scenes_cnn", 2)
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in text.splitlines() if line.startswith("| ")}
    assert {*FEW, "edges", "a constant map"} <= rows.keys()
    assert "| edges | 1.00 (1.00 to 1.00) |" in text  # after each step
    listed = text.partition(":")[2].partition("(")[0]
    summary = [line for line in text.split("<details>")[0].splitlines() if line.startswith("| ")]
    for line in summary:
        if line.startswith(tuple(f"| {name} " for name in FEW)):
            assert line.rstrip(" |").endswith("no") == (line.split(" | ")[0].strip("| ") in listed)
