"""Methods of anybody over networks whose cause is known: numbers beside slow loops, verdicts, maps of other libraries, files and runs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import Saliency
from numpy.typing import NDArray
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn
from torchcam.methods import GradCAM as OfTorchCam

import visattn
from visattn.data.scenes.causes import CausedScenes
from visattn.errors import MapError, OptionError, OutputError
from visattn.evaluation import Causes, Findings, find_causes
from visattn.evaluation.causes.bench import chosen_of
from visattn.evaluation.causes.exporting import export_scenes
from visattn.evaluation.causes.findings import CONTROLS, FEWEST, holm
from visattn.evaluation.causes.networks import PATCH_CLASS, CauseNetwork, another, cause_networks
from visattn.evaluation.given import as_map

SCENES = 3
Array = NDArray[np.float64]


def saliency(model: nn.Module, pixels: Tensor, label: int) -> Tensor:
    pixels = pixels.clone().requires_grad_()
    model(pixels)[0, label].backward()
    assert pixels.grad is not None
    return pixels.grad.abs()


def pairs_won(values: Array, mask: NDArray[np.bool_]) -> float:
    """Return the share of pairs, of a pixel of the mask and another, where the former has the larger value; ties count half."""
    inside, outside = values[mask], values[~mask]
    return float(np.mean([(one > outside).mean() + (one == outside).mean() / 2 for one in inside]))


def test_numbers_are_those_of_a_loop() -> None:
    (found,) = find_causes({"mine": saliency}, networks=["mark_cnn_0"], scenes=SCENES).findings
    model, other = (visattn.load_model(f"models/causes/{name}_cnn_0") for name in ("mark", "ground"))
    scenes = CausedScenes("mark", SCENES, seed=2)
    for number in range(SCENES):
        scene = scenes.scene(number)
        mask = scene.masks[0]
        values, elsewhere = (
            saliency(of, visattn.prepare(scene.image, of).pixels, scene.label).double().sum(1)[0].numpy() for of in (model, other)
        )
        assert found.auroc[number] == pytest.approx(pairs_won(values, mask), abs=1e-12)
        assert found.controls["cause without effect"][number] == pytest.approx(pairs_won(elsewhere, mask), abs=1e-12)
        assert found.touches[number] == mask.ravel()[values.argmax()]
        rows, columns = np.mgrid[:64, :64]
        prior = np.exp(-8 * (((rows + 0.5) / 64 - 0.5) ** 2 + ((columns + 0.5) / 64 - 0.5) ** 2))
        assert found.controls["center prior"][number] == pytest.approx(pairs_won(prior.round(12), mask), abs=1e-3)
        assert 0.3 < found.controls["shifted copies"][number] < 0.7
    assert found.grid == (64, 64)


def test_a_method_of_visattn_explains_the_class_of_the_cause() -> None:
    found = find_causes({"deep": {"method": "gradcam", "layer": "layer2"}}, networks=["border_cnn_0"], scenes=2).findings[0]
    model, scenes = visattn.load_model("models/causes/border_cnn_0"), CausedScenes("border", 2, seed=2)
    for number in range(2):
        scene = scenes.scene(number)
        explained = visattn.explain(model, scene.image, method="gradcam", target=scene.label, layer="layer2")
        cells = explained.panel.numpy().repeat(4, 0).repeat(4, 1)
        assert found.auroc[number] == pytest.approx(pairs_won(cells, scene.masks[0]), abs=1e-9)
    assert found.grid == (16, 16)


def of_grad_cam(model: nn.Module, pixels: Tensor, label: int) -> Any:
    return GradCAM(model, [model.layer3])(pixels, [ClassifierOutputTarget(label)])


def of_torch_cam(model: nn.Module, pixels: Tensor, label: int) -> Any:
    with OfTorchCam(model, "layer3") as extractor:
        return extractor(label, model(pixels))


def of_captum(model: nn.Module, pixels: Tensor, label: int) -> Any:
    return Saliency(model).attribute(pixels.requires_grad_(), target=label)


@pytest.mark.parametrize("maker", [of_grad_cam, of_torch_cam, of_captum])
def test_maps_of_other_libraries_need_no_conversion(maker: Callable[..., Any]) -> None:
    def plain(model: nn.Module, pixels: Tensor, label: int) -> Array:
        return np.asarray(as_map(maker(model, pixels, label)).values.tolist())

    one, two = find_causes({"theirs": maker, "plain": plain}, networks=["pattern_cnn_0"], scenes=2).findings
    assert one.auroc.tolist() == two.auroc.tolist()
    assert one.touches.tolist() == two.touches.tolist()
    assert len(set(one.auroc.tolist())) == 2


@pytest.mark.parametrize("ending", [".npy", ".txt", ".csv"])
def test_maps_of_files_are_those_of_the_function(ending: str, tmp_path: Path) -> None:
    networks = chosen_of(cause_networks(), ["mark_vit_0", "patch_vit_0"])
    path = export_scenes(tmp_path / "scenes", networks, 2, 2)
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        model = visattn.load_model(row["network"])
        pixels = visattn.prepare(str(path.parent / row["image"]), model).pixels
        values = saliency(model, pixels, int(row["class"])).sum(1)[0].numpy()  # float32, as files hold it
        place = (path.parent / row["map"]).with_suffix(ending)
        place.parent.mkdir(parents=True, exist_ok=True)
        if ending == ".npy":
            np.save(place, values)
        else:
            np.savetxt(place, values, fmt="%.17g", delimiter="," if ending == ".csv" else " ")
    found = find_causes({"files": path.parent, "mine": saliency}, networks=["mark_vit_0", "patch_vit_0"], scenes=2).findings
    for one, two in (found[:2], found[2:]):
        assert one.auroc == pytest.approx(two.auroc, abs=1e-12)
        assert set(one.controls) == set(CONTROLS)
        for name in CONTROLS:
            assert one.controls[name] == pytest.approx(two.controls[name], abs=1e-12)


def test_without_maps_where_the_cause_has_no_effect_nothing_is_found(tmp_path: Path) -> None:
    count = FEWEST
    scenes = CausedScenes("mark", count, seed=2)
    (tmp_path / "mark_cnn_0").mkdir()
    for number in range(count):
        np.save(tmp_path / "mark_cnn_0" / f"{number}.npy", scenes.scene(number).masks[0].astype(float))
    causes = find_causes({"truth": tmp_path}, networks=["mark_cnn_0"], scenes=count)
    (row,) = causes.rows()
    shown = row["auroc"], row["largest cell touches"], row["cause without effect"], row["p"], row["found"]
    assert shown == (1, 1, None, 1, "no")
    (tmp_path / "mark_cnn_0" / "without").mkdir()
    for number in range(count):
        np.save(tmp_path / "mark_cnn_0" / "without" / f"{number}.npy", np.random.default_rng(number).random((64, 64)))
    (row,) = find_causes({"truth": tmp_path}, networks="mark_cnn_0", scenes=count).rows()
    assert row["found"] == "yes"


def test_few_scenes_have_no_verdict() -> None:
    few = Causes([findings(around(0.95, FEWEST - 1)), findings(around(0.2, FEWEST - 1), "mark_cnn_1")])
    assert [(row["found"], row["inverted"]) for row in few.rows()] == [(None, None)] * 2
    assert few.verdicts()[0]["verdict"] == f"none: fewer than {FEWEST} scenes"
    enough = Causes([findings(around(0.95, FEWEST)), findings(around(0.2, FEWEST), "mark_cnn_1")])
    assert [(row["found"], row["inverted"]) for row in enough.rows()] == [("yes", "no"), ("no", "yes")]


def test_a_prior_that_the_network_moves_a_little_finds_nothing() -> None:
    prior = around(0.9)
    moved = prior + 0.05 + 0.002 * np.random.default_rng(3).standard_normal(len(prior))
    (row,) = Causes([findings(moved, controls={"cause without effect": prior})]).rows()
    assert (row["found"], float(row["low"]) > 0.8) == ("no", True)
    (row,) = Causes([findings(moved, controls={"cause without effect": prior - 0.2})]).rows()
    assert row["found"] == "yes"


def test_a_function_that_changes_its_network_changes_no_other_method() -> None:
    def spoils(model: nn.Module, pixels: Tensor, label: int) -> Tensor:
        model.train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        return saliency(model, pixels, label)

    options: dict[str, Any] = {"networks": ["color_cnn_0"], "scenes": 3}
    alone = find_causes(["gradcam"], **options).rows()[0]
    assert find_causes({"spoils": spoils, "gradcam": "gradcam"}, **options).rows()[1]["auroc"] == alone["auroc"]


def findings(values: Array, network: str = "mark_cnn_0", controls: dict[str, Array] | None = None) -> Findings:
    chance = np.full(len(values), 0.5) + 0.01 * np.random.default_rng(1).standard_normal(len(values))
    others = dict.fromkeys(CONTROLS, chance) | (controls or {})
    return Findings("m", "mark", "cnn", network, (8, 8), values, (values > 0.9).astype(float), others)


def around(mean: float, count: int = 30) -> Array:
    return np.clip(mean + 0.05 * np.random.default_rng(0).standard_normal(count), 0, 1)


def test_a_verdict_follows_from_the_worst_network() -> None:
    good, bad = around(0.95), around(0.3)
    five = [findings(good, f"mark_cnn_{seed}") for seed in range(5)]
    (verdict,) = Causes(five).verdicts()
    assert (verdict["verdict"], verdict["networks"], verdict["found"]) == ("may be trusted", 5, 5)
    (verdict,) = Causes(five[:4]).verdicts()
    assert verdict["verdict"] == "found in 4 of 4"
    (verdict,) = Causes([*five[:4], findings(bad, "mark_cnn_4")]).verdicts()
    assert verdict["verdict"] == "found in 4 of 5, inverted in 1"
    assert verdict["worst auroc"] == pytest.approx(bad.mean())
    assert verdict["least touches"] == 0


@pytest.mark.parametrize(
    ("values", "controls"),
    [
        (around(0.81), {}),  # the lower end of the interval lies below 0.8
        (around(0.95), {"center prior": around(0.96)}),  # the center is as good
        (around(0.95), {"shifted copies": around(0.95)}),  # no difference at all
    ],
)
def test_nothing_is_found_below_the_bound_or_a_control(values: Array, controls: dict[str, Array]) -> None:
    (row,) = Causes([findings(values, controls=controls)]).rows()
    assert row["found"] == "no"


def test_many_rows_raise_the_bar() -> None:
    weak = around(0.95)
    close = {"center prior": weak - np.random.default_rng(2).normal(0.11, 0.02, len(weak))}
    (alone,) = Causes([findings(weak, controls=close)]).rows()
    among = Causes(
        [findings(weak, controls=close), *(findings(around(0.5), f"mark_cnn_{seed}") for seed in range(1, 60))]
    ).rows()[0]
    assert (alone["found"], among["found"]) == ("yes", "no")
    assert float(among["p"]) > float(alone["p"])


def test_correction_of_holm() -> None:
    """Sorted p-values times 3, 2 and 1, never falling, at most 1."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@pytest.mark.parametrize("kind", ["cnn", "vit"])
def test_a_patch_turns_its_scenes_and_only_covers_its_mask(kind: str) -> None:
    (network,) = chosen_of(cause_networks(), [f"patch_{kind}_0"])
    cases = list(network.cases(4))
    assert len(cases) == 4
    for case in cases:
        assert case.without is not None
        assert int(network.model(visattn.prepare(case.image, network.model).pixels).argmax()) == PATCH_CLASS == case.label
        changed = (np.asarray(case.image) != np.asarray(case.without)).any(-1)
        assert not (changed & ~case.mask).any()
        assert case.mask.sum() == 16 * 16


def test_another_network_decides_by_another_cause() -> None:
    every = cause_networks()
    for network in every:
        if network.cause != "patch":
            other = another(network, every)
            assert (other.cause == network.cause, other.kind) == (False, network.kind)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    calls = list[int]()

    def counted(model: nn.Module, pixels: Tensor, label: int) -> Tensor:
        calls.append(label)
        return saliency(model, pixels, label)

    journal, names = tmp_path / "journal.jsonl", ["mark_cnn_0", "mark_cnn_1"]
    options: dict[str, Any] = {"networks": names, "scenes": 2, "journal": journal}
    whole = find_causes({"mine": counted}, **options).rows()
    assert len(calls) == 8
    assert find_causes({"mine": counted}, **options).rows() == whole
    assert len(calls) == 16  # nothing tells whether it is the same function
    counted.source = "a version"  # type: ignore[attr-defined]
    find_causes({"mine": counted}, **options, anew=True)
    assert len(calls) == 24
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:2]) + lines[2][:40])  # as if it was killed while writing
    assert find_causes({"mine": counted}, **options).rows() == whole
    assert len(calls) == 28
    counted.source = "a new version"  # type: ignore[attr-defined]
    find_causes({"mine": counted}, **options)
    assert len(calls) == 36
    with pytest.raises(OutputError, match=r"journal\.jsonl: of a run with other settings \(scenes was 2, now 3"):
        find_causes({"mine": counted}, **options | {"scenes": 3})


def test_wrong_input_is_named(tmp_path: Path) -> None:
    for change, text in (
        ({"methods": ["gradcm"]}, "gradcam"),
        ({"methods": []}, "a method"),
        ({"methods": ["gradcam"], "networks": ["makr"]}, "mark"),
        ({"methods": ["gradcam"], "scenes": 1}, "scenes"),
        ({"methods": {"files": tmp_path / "none"}}, "no such folder"),
        ({"methods": {"a": 5}}, "a method must be"),
        ({"methods": {"a": {"method": "gradcam", "layr": "x"}}}, "layr"),
        ({"methods": "gradcam", "seed": -1}, "seed"),
    ):
        with pytest.raises(OptionError, match=text):
            find_causes(**{"networks": ["mark_cnn_0"], "scenes": 2, **change})  # type: ignore[arg-type]
    (tmp_path / "mark_cnn_0").mkdir()
    with pytest.raises(MapError, match=r"no file for 0\.png"):
        find_causes({"files": tmp_path}, networks=["mark_cnn_0"], scenes=2)
    with pytest.raises(MapError, match="finite"):
        find_causes({"nan": lambda *_: torch.full((8, 8), torch.nan)}, networks=["mark_cnn_0"], scenes=2)


def test_a_method_that_does_not_apply_is_left_out() -> None:
    found = find_causes(["rollout", "attention", "pca", "eigencam"], networks=["mark_cnn_0", "mark_vit_0"], scenes=2)
    assert [(one.map, one.network, bool(one.left_out)) for one in found.findings] == [
        ("rollout", "mark_cnn_0", True),
        ("attention", "mark_cnn_0", True),
        ("pca", "mark_cnn_0", True),
        ("eigencam", "mark_cnn_0", False),
        ("rollout", "mark_vit_0", False),
        ("attention", "mark_vit_0", False),
        ("pca", "mark_vit_0", True),
        ("eigencam", "mark_vit_0", False),
    ]
    assert len(found.rows()) == 4


def test_numbers_can_be_json(tmp_path: Path) -> None:
    causes = find_causes({"mine": saliency}, networks=["mark_cnn_0"], scenes=2)
    assert json.loads(json.dumps([causes.rows(), causes.verdicts()], allow_nan=False))


def test_other_weights_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "journal.jsonl"
    asked: dict[str, Any] = {"methods": "gradcam", "networks": "mark_cnn_0", "scenes": 2, "journal": journal}
    before = find_causes(**asked).findings[0].auroc.tolist()
    count = len(journal.read_text().splitlines())
    assert find_causes(**asked).findings[0].auroc.tolist() == before
    assert len(journal.read_text().splitlines()) == count
    for changed in ("mark_cnn_0", "ground_cnn_0"):  # the network itself, and that of the control

        def digest(network: CauseNetwork, changed: str = changed) -> str:
            return f"{network.name} {network.name == changed}"

        monkeypatch.setattr(CauseNetwork, "digest", property(digest))
        find_causes(**asked)
        count += 1
        assert len(journal.read_text().splitlines()) == count
