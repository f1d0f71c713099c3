from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import visattn
from visattn.core.pipeline.label_files import read_labels
from visattn.core.pipeline.passes import look
from visattn.core.pipeline.targets import NoClasses, Target
from visattn.errors import OptionError

LOGITS = torch.tensor([[0.5, 2.0, -1.0, 0.0], [3.0, -2.0, 0.25, 1.0]])
LABELS = ("tench, Tinca tinca", "espresso", "crane", "crane, bird")


def test_top_class_of_each_image_is_the_default() -> None:
    found = Target(task="classes").resolve(LOGITS)
    assert found.score(LOGITS).tolist() == [2.0, 3.0]
    assert found.texts[0].startswith("logit of class 1 = 2; this is the predicted class, with probability 7")
    assert found.texts[1].startswith("logit of class 0 = 3; this is the predicted class")


@pytest.mark.parametrize("of", [2, "2"])
def test_one_class_of_all_images(of: Any) -> None:
    found = Target(of, task="classes").resolve(LOGITS)
    assert found.score(LOGITS).tolist() == [-1.0, 0.25]
    own, best = LOGITS[0].softmax(0)[[2, 1]].tolist()
    told = f"logit of class 2 = -1, its probability {own:.1%}; the predicted class is class 1, with probability {best:.1%}"
    assert told in found.texts[0]


@pytest.mark.parametrize(("name", "index"), [("espresso", 1), ("ESPRESSO ", 1), ("Tinca tinca", 0), ("tench, tinca tinca", 0)])
def test_class_by_name(name: str, index: int) -> None:
    found = Target(name, labels=LABELS).resolve(LOGITS)
    assert found.score(LOGITS).tolist() == LOGITS[:, index].tolist()
    assert f"{LABELS[index].split(',')[0]} (class {index})" in found.texts[0]


def test_versus_subtracts_the_other_class() -> None:
    found = Target(0, versus="espresso", labels=LABELS).resolve(LOGITS)
    assert found.score(LOGITS).tolist() == [-1.5, 5.0]
    assert "logit of tench (class 0) versus espresso (class 1) = -1.5" in found.texts[0]


def test_probability_and_its_logarithm() -> None:
    shares = LOGITS.double().softmax(-1)[:, 3]
    torch.testing.assert_close(Target(3, target_space="prob").resolve(LOGITS).score(LOGITS), shares.float())
    torch.testing.assert_close(Target(3, target_space="logprob").resolve(LOGITS).score(LOGITS), shares.log().float())


def test_function_of_the_output_takes_any_output() -> None:
    found = Target(lambda output: output["features"].sum(1)).resolve({"features": LOGITS})
    assert found.score({"features": LOGITS}).tolist() == [1.5, 2.25]


REFUSALS: list[tuple[Target, Any, str]] = [
    (Target(4), LOGITS, "target must be a class from 0 to 3, got 4"),
    (Target(-1), LOGITS, "target must be a class from 0 to 3, got -1"),
    (Target(0, versus=9), LOGITS, "class from 0 to 3, got 9"),
    (
        Target("expresso", labels=LABELS),
        LOGITS,
        "unknown class 'expresso'. Close matches: espresso. Pass one of them, or an index from 0 to 3",
    ),
    (Target("crane", labels=LABELS), LOGITS, "'crane' matches several classes: 2 (crane), 3 (crane, bird). Pass an index"),
    (Target("dog"), LOGITS, "class names are unknown for this model, so 'dog' cannot be looked up"),
    (Target(0, labels=LABELS[:3]), LOGITS, "labels must name 4 classes, got 3"),
    (Target(0, target_space="odds"), LOGITS, "unknown target space 'odds'"),  # type: ignore[arg-type]
    (Target(torch.sum, versus=1), LOGITS, "versus and target_space do not apply"),
]


@pytest.mark.parametrize(("target", "output", "message"), REFUSALS, ids=[message for *_, message in REFUSALS])
def test_target_that_does_not_exist_is_refused(target: Target, output: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        target.resolve(output)
    assert message in str(caught.value)


@pytest.mark.parametrize("output", [torch.zeros(2, 3, 4), (LOGITS, LOGITS), {"boxes": LOGITS}], ids=["map", "two", "dictionary"])
def test_output_without_classes_needs_a_function(output: Any) -> None:
    with pytest.raises(NoClasses, match="Pass a function of its output as target"):
        Target().resolve(output)


def test_a_single_output_is_explained_if_it_is_asked_for() -> None:
    with pytest.raises(NoClasses, match=r"the model returned \(2, 1\). Explain its only output: target='0'"):
        Target().resolve(LOGITS[:, :1])
    assert Target(0).resolve(LOGITS[:, :1]).texts[0] == "output 0 = 0.5"


def test_logits_of_a_dictionary_are_those_of_a_tensor() -> None:
    assert Target(2).resolve({"logits": LOGITS}).texts == Target(2).resolve(LOGITS).texts


def test_labels_are_read_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("tench\n\n espresso \n", encoding="utf-8")
    assert read_labels(tmp_path / "names.txt") == ("tench", "espresso")
    (tmp_path / "names.bin").write_bytes(b"\xff\xfe\x00")
    for name in ("names.bin", "missing.txt"):
        with pytest.raises(OptionError, match=f"{name}: labels must be a text file with one name per line"):
            read_labels(tmp_path / name)


def test_class_and_scores_are_stored_as_values_of_each_image() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0], [1.0, 0.5, 3.0]])
    found = Target(1, labels=("cat", "dog, hound", "cow")).resolve(logits).scores
    shares = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in logits.tolist()]
    expected = [
        {"class": 1, "name": "dog", "versus": None, "target_space": "logit", "score": 2.0, "predicted": 1},
        {"class": 1, "name": "dog", "versus": None, "target_space": "logit", "score": 0.5, "predicted": 2},
    ]
    for one, values, row in zip(found, expected, shares, strict=True):
        assert {name: one[name] for name in values} == values
        assert one["probability"] == pytest.approx(row[1])
        assert one["predicted_probability"] == pytest.approx(max(row))
    assert Target(lambda output: output.sum(1)).resolve(logits).scores == ()


def test_one_image_of_a_batch_keeps_its_own_scores() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    prepared = visattn.prepare_tensor(pixels, model)
    made = visattn.methods.gradcam(look(model, prepared, target=Target([0, 2]), features=["0"]))
    assert [one["class"] for one in made.provenance.scores] == [0, 2]
    assert [made.at(batch=image).provenance.scores[0]["class"] for image in (0, 1)] == [0, 2]
