"""Evaluation of several maps of several photos: the numbers of the metrics themselves, nulls beside them, and runs that go on."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import visattn
from visattn.core.families import input_spec
from visattn.data.scenes import Scenes
from visattn.errors import MissingExtra, OptionError, OutputError, ResourceError
from visattn.evaluation import (
    METRICS,
    NULLS,
    Evaluation,
    Evaluator,
    Protocol,
    auroc,
    deletion,
    evaluate,
    evaluating,
    infidelity,
    insertion,
    nulls_of,
    perturbation,
    saco,
    sensitivity_n,
)
from visattn.evaluation.evaluation_journal import EvaluationJournal
from visattn.evaluation.evaluation_page import evaluation_page

SCENES = ["scene:7", "scene:3"]
METHODS = ["relevance", "gradcam"]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return visattn.load_model("scenes_vit")


def run(model: nn.Module, **options: Any) -> Evaluation:
    kept: dict[str, Any] = {"methods": METHODS, "metrics": ["deletion", "saco"], "nulls": 2, "steps": 4}
    return evaluate(model, SCENES, **kept | options)


def numbers(found: Evaluation) -> list[Any]:
    return [(one.photo, one.target, one.map, one.left_out, repr(one.own), repr(one.nulls)) for one in found.numbers]


def test_numbers_are_those_of_the_metrics(model: nn.Module) -> None:
    found = run(model, metrics=["deletion", "insertion", "saco"])
    assert [(one.photo, one.map) for one in found.numbers] == [(scene, method) for scene in SCENES for method in METHODS]
    for place, one in enumerate(found.numbers):
        pixels = visattn.prepare(one.photo, model).pixels
        label = int(model(pixels).argmax())

        def score(inputs: Tensor, label: int = label) -> Tensor:
            scores: Tensor = model(inputs).softmax(-1)[:, label]
            return scores

        shown = visattn.explain(model, one.photo, method=one.map).panel
        nulls = nulls_of(shown, pixels, count=2, seed=place // 2)
        metrics: dict[str, Callable[[Any], float]] = {
            "deletion": lambda given, score=score, pixels=pixels: deletion(score, pixels, given, steps=4).area,  # type: ignore[misc]
            "insertion": lambda given, score=score, pixels=pixels: insertion(score, pixels, given, steps=4).area,  # type: ignore[misc]
            "saco": lambda given, score=score, pixels=pixels: saco(score, pixels, given),  # type: ignore[misc]
        }
        for name, metric in metrics.items():
            assert one.own[name] == pytest.approx(metric(shown), abs=1e-6)
            assert list(one.nulls[name]) == list(NULLS)
            for kind, several in nulls.items():
                assert one.nulls[name][kind] == pytest.approx([metric(null) for null in several], abs=1e-6)
        assert f"class {label}" in one.target


@pytest.mark.parametrize("baseline", ["black", "mean", "image mean", "blur"])
def test_a_baseline_by_name_is_the_same_for_all_metrics(baseline: str, model: nn.Module) -> None:
    pixels, spec = visattn.prepare("scene:7", model).pixels, input_spec(model)
    label = int(model(pixels).argmax())
    black = -(torch.tensor(spec.mean) / torch.tensor(spec.std))[:, None, None]
    given: Any = {"black": black, "mean": 0.0}.get(baseline, baseline)

    def score(inputs: Tensor) -> Tensor:
        scores: Tensor = model(inputs).softmax(-1)[:, label]
        return scores

    shown = visattn.explain(model, "scene:7", method="relevance").panel
    expected = {
        "deletion": deletion(score, pixels, shown, steps=4, baseline=given).area,
        "insertion": insertion(score, pixels, shown, steps=4, baseline=given).area,
        "positive": perturbation(score, pixels, shown, sign="positive", baseline=given).area,
        "saco": saco(score, pixels, shown, baseline=given),
        "sensitivity_n": sensitivity_n(score, pixels, shown, baseline=given).mean,
        "infidelity": infidelity(score, pixels, shown, baseline=given),
    }
    options: dict[str, Any] = {"metrics": list(expected), "nulls": 0, "steps": 4, "baseline": baseline}
    (one,) = evaluate(model, ["scene:7"], ["relevance"], **options).numbers
    assert one.own == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_rows_hold_means_and_the_share_of_nulls_that_are_beaten(model: nn.Module) -> None:
    found = run(model)
    rows = found.rows()
    assert [(row["metric"], row["map"], row["photos"]) for row in rows] == [
        (metric, method, 2) for metric in ("deletion", "saco") for method in METHODS
    ]
    for row in rows:
        chosen = [one for one in found.numbers if one.map == row["map"]]
        metric = str(row["metric"])
        assert row["value"] == pytest.approx(sum(one.own[metric] for one in chosen) / 2)
        shares = list[float]()
        for one in chosen:
            others = [value for several in one.nulls[metric].values() for value in several]
            points = [
                0.5 if value == one.own[metric] else float((one.own[metric] > value) == METRICS[metric].higher)
                for value in others
            ]
            shares.append(sum(points) / len(points))
        assert row["beaten"] == pytest.approx(sum(shares) / 2)
        assert row["edges"] == pytest.approx(sum(one.nulls[metric]["edges"][0] for one in chosen) / 2)


def test_maps_of_other_origin(model: nn.Module) -> None:
    arrays = [visattn.explain(model, scene, method="relevance").panel.numpy() for scene in SCENES]
    found = run(model, maps={"mine": arrays, "flat": [np.ones((4, 4))] * 2})
    mine, flat = ([one for one in found.numbers if one.map == name] for name in ("mine", "flat"))
    ours = [one for one in found.numbers if one.map == "relevance"]
    for one, two in zip(mine, ours, strict=True):
        assert one.own == pytest.approx(two.own, abs=1e-6)
    assert all(math.isnan(one.own["saco"]) and math.isnan(one.beaten("saco")) for one in flat)
    assert [row["photos"] for row in found.rows() if row["map"] == "flat"] == [2, 0]


def test_a_method_that_does_not_apply_says_why(model: nn.Module) -> None:
    found = run(model, methods=["relevance", "gates"])
    left_out = [one for one in found.numbers if one.left_out]
    assert [one.map for one in left_out] == ["gates", "gates"]
    assert "gate" in left_out[0].left_out
    assert next(row for row in found.rows() if row["map"] == "gates")["value"] is None


def test_metrics_of_places_take_masks(model: nn.Module) -> None:
    scenes = Scenes(2, (64, 64), seed=5)
    pictures, masks = [Image.fromarray(scenes.scene(index).image) for index in range(2)], [scenes.scene(0).masks[0], None]
    found = evaluate(
        model, pictures, ["relevance", "input_x_gradient"], masks=masks, metrics=["auroc", "energy_inside", "saco"], nulls=1
    )
    for one in found.numbers[:2]:
        explained = visattn.explain(model, pictures[0], method=one.map)
        signed = explained.panel.signed
        assert one.own["auroc"] == pytest.approx(float(auroc(explained.panel, masks[0], explained.geometry)))
        assert math.isnan(one.own["energy_inside"]) == signed
    assert all(math.isnan(one.own["auroc"]) and not math.isnan(one.own["saco"]) for one in found.numbers[2:])
    assert [row["photos"] for row in found.rows()] == [1, 1, 1, 0, 2, 2]
    with pytest.raises(OptionError, match="unknown metric"):
        evaluate(model, pictures, ["relevance"], metrics=["auroc"])


class Asked:
    """What is computed, and an interruption after some of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.most, self._real = 0, 10**6, evaluating.explained  # type: ignore[attr-defined]
        monkeypatch.setattr(evaluating, "explained", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.count == self.most:
            raise KeyboardInterrupt
        self.count += 1
        return self._real(*args, **kwargs)


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_a_run_goes_on_where_it_stopped(done: int, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(model)
    asked, journal = Asked(monkeypatch), tmp_path / "evaluation.jsonl"
    asked.most = done
    with pytest.raises(KeyboardInterrupt):
        run(model, journal=journal)
    with journal.open("a") as file:
        file.write('{"place": 1, "sha')  # the line that was being written
    asked.count, asked.most = 0, 10**6
    assert numbers(run(model, journal=journal)) == numbers(whole)
    assert asked.count == 4 - done
    assert numbers(run(model, journal=str(journal))) == numbers(whole)
    assert asked.count == 4 - done


def test_numbers_that_are_not_defined_are_kept(model: nn.Module, tmp_path: Path) -> None:
    options: dict[str, Any] = {"methods": ["gates"], "maps": {"flat": [np.ones((4, 4))] * 2}, "journal": tmp_path / "j"}
    first, second = (run(model, **options) for _ in range(2))
    assert numbers(first) == numbers(second)
    assert "NaN" not in (tmp_path / "j").read_text()


@pytest.mark.parametrize(
    "change",
    [{"steps": 5}, {"nulls": 3}, {"metrics": ["saco"]}, {"seed": 1}, {"target": 2}, {"img_size": 32}, {"baseline": "black"}],
)
def test_a_journal_of_other_settings_is_refused(change: dict[str, Any], model: nn.Module, tmp_path: Path) -> None:
    journal = tmp_path / "evaluation.jsonl"
    run(model, journal=journal)
    before = journal.read_bytes()
    with pytest.raises(OutputError, match="other settings"):
        run(model, journal=journal, **change)
    assert journal.read_bytes() == before


def test_a_map_of_another_shape_is_another_map(model: nn.Module, tmp_path: Path) -> None:
    values, options = np.random.default_rng(0).random((4, 16)), {"methods": [], "metrics": ["saco"], "journal": tmp_path / "j"}
    for shown in (values, values.reshape(16, 4)):
        kept = run(model, maps={"mine": [shown] * 2}, **options)
        alone = run(model, maps={"mine": [shown] * 2}, **options | {"journal": None})
        assert numbers(kept)[-1] == numbers(alone)[-1]


def test_metrics_in_another_order_go_on(model: nn.Module, tmp_path: Path) -> None:
    first = run(model, journal=tmp_path / "j")
    again = run(model, journal=tmp_path / "j", metrics=["saco", "deletion"])
    assert [row["value"] for row in again.rows() if row["metric"] == "saco"] == [
        row["value"] for row in first.rows() if row["metric"] == "saco"
    ]


def test_a_run_without_results_is_forgotten(model: nn.Module, tmp_path: Path) -> None:
    Evaluator(model, ["relevance"], [], ["saco"], Protocol(), journal=tmp_path / "j")
    run(model, journal=tmp_path / "j")
    assert numbers(run(model, journal=tmp_path / "j")) == numbers(run(model))


def test_a_run_can_begin_anew(model: nn.Module, tmp_path: Path) -> None:
    run(model, journal=tmp_path / "j")
    run(model, journal=tmp_path / "j", steps=5, anew=True)
    assert json.loads((tmp_path / "j").read_text().splitlines()[0])["settings"]["protocol"]["steps"] == 5


def test_a_map_that_is_refused_names_itself_and_leaves_the_others(model: nn.Module) -> None:
    maps = {"holes": [np.full((4, 4), np.nan), np.ones((4, 4))], "large": [np.ones((300, 450))] * 2}
    found = run(model, maps=maps, methods=["relevance"], metrics=["saco"])
    told = {(one.photo, one.map): one.left_out for one in found.numbers}
    assert "NaN" in told["scene:7", "holes"]
    assert "more than the input has pixels" in told["scene:3", "large"]
    assert [told[scene, "relevance"] for scene in SCENES] == ["", ""]


def test_an_explanation_of_another_photo_is_refused(model: nn.Module, tmp_path: Path) -> None:
    for scene in SCENES:
        visattn.load_image(scene).save(tmp_path / f"{scene[-1]}.png")
    files = [tmp_path / "7.png", tmp_path / "3.png"]
    explained = [visattn.explain(model, file, method="relevance") for file in files]
    own = evaluate(model, files, [], maps={"own": explained}, metrics=["saco"], nulls=0)
    assert [one.left_out for one in own.numbers] == ["", ""]
    swapped = evaluate(model, files, [], maps={"other": explained[::-1]}, metrics=["saco"], nulls=0)
    assert all("another photo" in one.left_out for one in swapped.numbers)
    cropped = visattn.explain(model, np.zeros((90, 64, 3), np.uint8), method="relevance")
    (one,) = evaluate(model, [np.zeros((64, 64, 3), np.uint8)], [], maps={"crop": [cropped]}, metrics=["saco"], nulls=0).numbers
    assert "another crop" in one.left_out


def test_photos_that_are_added_count_themselves(model: nn.Module) -> None:
    evaluator = Evaluator(model, ["relevance", "rollout"], [], ["saco"], Protocol(nulls=0))
    for scene in (*SCENES, "scene:5"):
        evaluator.add(scene, {})
    assert [one.place for one in evaluator.numbers] == [0, 0, 1, 1, 2, 2]


def test_changed_weights_are_other_settings(model: nn.Module, tmp_path: Path) -> None:
    journal = tmp_path / "evaluation.jsonl"
    run(model, journal=journal)
    other: Any = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[0].attn.qkv.weight[::7] *= 0.3
    with pytest.raises(OutputError, match="weights was"):
        run(other, journal=journal)


@pytest.mark.parametrize(
    "content", ["no journal\n", "{}\n", json.dumps({"journal": "evaluation", "settings": {}, "more": 1}) + "\n"]
)
def test_a_file_that_is_no_journal_is_left_alone(content: str, model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(OutputError, match=r"notes\.txt"):
        run(model, journal=path)
    assert path.read_text() == content


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_journal_is_refused_or_complete(seed: int, model: nn.Module, tmp_path: Path) -> None:
    """Bytes of a journal are changed at random: it is refused in one line, or its numbers have tables and a page."""
    path = tmp_path / "journal.jsonl"
    run(model, journal=path, metrics=["deletion", "saco"])
    content, settings = path.read_bytes(), json.loads(path.read_bytes().splitlines()[0])["settings"]
    random, refused = np.random.default_rng(seed), list[str]()
    for _ in range(150):
        damaged = bytearray(content)
        for place in random.integers(len(content), size=random.integers(1, 4)).tolist():
            new = [b"", b"NaN", b"1e999", b"[]", b"null", b'"x"', b"\xff", b"\n", b"-"][random.integers(9)]
            damaged[place : place + int(random.integers(0, 40))] = new
        path.write_bytes(bytes(damaged))
        try:
            found = EvaluationJournal(path, settings)
        except OutputError as error:
            refused.append(str(error))
            continue
        numbers = Evaluation(list(found._known.values()), settings["metrics"])
        if numbers.numbers:
            assert evaluation_page(numbers, "model", "none", Protocol())
    assert len(refused) > 50
    assert not any("\n" in text for text in refused)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"metrics": ["auc"]}, "unknown metric"),
        ({"metrics": []}, "a metric"),
        ({"methods": []}, "a method or maps"),
        ({"methods": ["relevence"]}, "relevance"),
        ({"nulls": -1}, "nulls"),
        ({"steps": 0}, "steps"),
        ({"maps": {"mine": [np.ones((4, 4))]}}, "mine"),
        ({"by": "patches"}, "unit"),
        ({"baseline": "gray"}, "baseline"),
        ({"seed": -1}, "seed"),
        ({"metrics": ["saco", "saco"]}, "two metrics have one name"),
        ({"methods": ["relevance", "relevance"]}, "two maps have one name"),
        ({"maps": {"relevance": [np.ones((4, 4))] * 2}}, "two maps have one name"),
        ({"target": lambda outputs: outputs[:, 0], "journal": "journal.jsonl"}, "one function from another"),
    ],
)
def test_wrong_options_are_named(change: dict[str, Any], text: str, model: nn.Module) -> None:
    with pytest.raises(OptionError, match=text):
        run(model, **change)


def test_nulls_of_an_array() -> None:
    values: NDArray[np.float64] = np.random.default_rng(0).random((5, 6))
    pixels = visattn.prepare("scene:7", visattn.load_model("scenes_vit")).pixels
    found = nulls_of(values, pixels, count=4)
    assert {kind: len(several) for kind, several in found.items()} == {
        "shifted copies": 4,
        "flipped copies": 3,
        "smooth noise": 4,
        "center prior": 1,
        "edges": 1,
    }
    for several in (found["shifted copies"], found["flipped copies"]):
        for one in several:
            assert sorted(one.numpy().ravel()) == sorted(values.ravel())
            assert not (one.numpy() == values).all()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"target": "f", "labels": list("abcdef")}, {"target": "f", "labels": list("abcdfe")}),
        ({"target": "similar:scene:1", "task": "embedding"}, {"target": "similar:scene:2", "task": "embedding"}),
        ({"mean": (0.5, 0.5, 0.5)}, {"mean": (0.5, 0.5, 0.501)}),
        ({"target": "label:" + "a" * 50 + "b", "labels": ["a" * 50 + end for end in "abcdef"]},) * 2,
    ],
)
def test_a_journal_holds_the_whole_question(one: dict[str, Any], two: dict[str, Any], model: nn.Module, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    first = run(model, methods=["relevance"], journal=journal, **one)
    content = journal.read_bytes()
    assert numbers(run(model, methods=["relevance"], journal=journal, **one)) == numbers(first)
    assert journal.read_bytes() == content
    if one != two:
        with pytest.raises(OutputError, match="other settings"):
            run(model, methods=["relevance"], journal=journal, **two)


def test_a_journal_refuses_functions_of_any_option(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="one function from another"):
        run(model, journal=tmp_path / "journal.jsonl", transform=lambda picture: picture)


@pytest.mark.parametrize("error", [MissingExtra, ResourceError])
def test_what_the_machine_lacks_is_not_kept(
    error: type[Exception], model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> float:
        raise error("not on this machine")

    journal = tmp_path / "journal.jsonl"
    with monkeypatch.context() as patched:
        patched.setitem(METRICS, "saco", METRICS["saco"]._replace(compute=missing))
        with pytest.raises(error, match="not on this machine"):
            run(model, journal=journal)
    assert numbers(run(model, journal=journal)) == numbers(run(model))


@pytest.mark.parametrize(
    "content", [b'{"my": "precious data"}', b"text", b'{"journal":"evaluation","settings":{"model":"another']
)
def test_a_file_of_somebody_else_is_not_replaced(content: bytes, model: nn.Module, tmp_path: Path) -> None:
    journal = tmp_path / "mine.json"
    journal.write_bytes(content)
    with pytest.raises(OutputError, match="not a journal of this kind"):
        run(model, journal=journal)
    assert journal.read_bytes() == content


def test_a_torn_first_line_is_written_again(model: nn.Module, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    found = run(model, journal=journal)
    content = journal.read_bytes()
    journal.write_bytes(content[:200])
    assert numbers(run(model, journal=journal)) == numbers(found)
    heads = (part.splitlines()[0] for part in (content, journal.read_bytes()))
    assert len(set(heads)) == 1


def test_methods_without_a_class_stand_beside_those_of_one(model: nn.Module) -> None:
    found = run(model, methods=["relevance", "rollout"], target=3, target_space="logit")
    alone = run(model, methods=["rollout"], target=3, target_space="logit")
    assert [one.left_out for one in found.numbers] == [""] * 4
    assert [one.own for one in found.numbers if one.map == "rollout"] == [one.own for one in alone.numbers]
    assert len({(one.place, one.target) for one in found.numbers}) == len(SCENES)


def test_an_explanation_is_its_mean_over_heads(model: nn.Module) -> None:
    explained = [visattn.explain(model, scene, method="attention") for scene in SCENES]
    assert explained[0].map.axes == ("head",)
    found = run(model, methods=[], maps={"heads": explained, "mean": [one.panel for one in explained]})
    heads, mean = ([one.own for one in found.numbers if one.map == name] for name in ("heads", "mean"))
    assert heads == mean
    assert heads[0].keys() == {"deletion", "saco"}
