"""Words about outputs: probabilities, classes and names only where they are known, in Python, on the command line and in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import visattn
from tests.cli.test_commands import Run, photo, run
from visattn.core.pipeline.targets import NoClasses
from visattn.errors import OptionError
from visattn.studies import html_of

__all__ = ["photo", "run"]

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
LETTERS = list("abcde")


class Outputs(nn.Module):
    """CNN with five numbers, from which a function makes its output."""

    def __init__(self, made: Callable[[Tensor], Any], count: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.made = timm.create_model("resnet10t", num_classes=count), [made]

    def forward(self, x: Tensor) -> Any:
        return self.made[0](self.net(x) * 20)


class Case(NamedTuple):
    """Output, what is said besides, and the beginning and the rest of the words."""

    made: Callable[[Tensor], Any]
    told: dict[str, Any]
    begins: str
    probability: bool


def ordinal(y: Tensor) -> Tensor:
    return y.sigmoid().cumprod(-1)


CASES: dict[str, Case] = {
    "logits of nobody knows what": Case(lambda y: y, {}, "output 4 = ", False),
    "softmax inside": Case(lambda y: y.softmax(-1), {}, "probability of class 4 = ", True),
    "softmax inside, in half precision": Case(lambda y: y.half().softmax(-1), {}, "probability of class 4 = ", True),
    "softmax inside, with names": Case(lambda y: y.softmax(-1), {"labels": LETTERS}, "probability of e (class 4) = ", True),
    "softmax inside, its probability": Case(lambda y: y.softmax(-1), {"target_space": "prob"}, "probability of class 4 = ", True),
    "softmax inside, its logarithm": Case(
        lambda y: y.softmax(-1), {"target_space": "logprob"}, "log-probability of class 4 = ", True
    ),
    "log-softmax inside": Case(lambda y: y.log_softmax(-1), {}, "log-probability of class 4 = ", True),
    "log-softmax inside, its probability": Case(
        lambda y: y.log_softmax(-1), {"target_space": "prob"}, "probability of class 4 = ", True
    ),
    "sigmoid inside": Case(lambda y: y.sigmoid(), {}, "output 4 = ", False),
    "sigmoid inside, of labels": Case(lambda y: y.sigmoid(), {"task": "multi_label"}, "probability of label 4 = ", True),
    "multi-label": Case(lambda y: y, {"task": "multi_label"}, "logit of label 4 = ", True),
    "multi-label with names": Case(
        lambda y: y, {"task": "multi_label", "labels": LETTERS, "target": "b"}, "logit of b (label 1) = ", True
    ),
    "multi-label, its probability": Case(
        lambda y: y, {"task": "multi_label", "target_space": "prob"}, "probability of label 4 = ", True
    ),
    "classes as the user says": Case(lambda y: y, {"task": "classes"}, "logit of class 4 = ", True),
    "classes with names": Case(lambda y: y, {"labels": LETTERS}, "logit of e (class 4) = ", True),
    "classes, one against another": Case(
        lambda y: y, {"labels": LETTERS, "versus": "a"}, "logit of e (class 4) versus a (class 0) = ", True
    ),
    "ordinal": Case(ordinal, {}, "output 0 = ", False),
    "regression": Case(lambda y: y, {"task": "regression"}, "output 4 = ", False),
    "regression with names": Case(lambda y: y, {"task": "regression", "labels": LETTERS}, "e (output 4) = ", False),
    "angles": Case(lambda y: torch.atan2(y, y.flip(1)), {}, "output ", False),
    "box": Case(lambda y: y[:, :4].sigmoid(), {}, "output ", False),
    "embedding": Case(lambda y: y, {"task": "embedding", "target": 3}, "component 3 = ", False),
    "embedding of length 1": Case(lambda y: y / y.norm(dim=-1, keepdim=True), {}, "output 4 = ", False),
    "hash code": Case(lambda y: y.tanh(), {}, "output 4 = ", False),
    "softmax that the user asks for": Case(lambda y: y, {"target_space": "prob"}, "softmax at output 4 = ", False),
    "logits in a dictionary": Case(lambda y: {"logits": y, "loss": y.sum()}, {}, "output 4 = ", False),
    "logits behind their softmax": Case(lambda y: (y.softmax(-1), y), {}, "output 4 = ", False),
    "logits before their sigmoid": Case(lambda y: (y, y.sigmoid()), {"task": "multi_label"}, "logit of label 4 = ", True),
    "one logit": Case(lambda y: y[:, :1], {"target": 0}, "output 0 = ", False),
    "one logit of a label": Case(lambda y: y[:, :1], {"task": "multi_label"}, "logit of label 0 = ", True),
    "mask": Case(
        lambda y: y[:, :, None, None].expand(-1, -1, 4, 4),
        {"target": "pixel:30,30"},
        "output of channel 4, the largest at",
        False,
    ),
    "mask of classes": Case(
        lambda y: y[:, :, None, None].expand(-1, -1, 4, 4),
        {"target": "pixel:30,30", "labels": LETTERS},
        "logit of e, which is predicted at",
        False,
    ),
}
REFUSED: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any], str]] = {
    "two heads": (lambda y: (y, y), {}, r"tuple with 0 \(1, 5\), 1 \(1, 5\). Pass a function of its output as target"),
    "two heads of classes": (lambda y: (y, (y.flip(1)).softmax(-1)), {}, "the model returned tuple with 0"),
    "many small numbers in half precision": (
        lambda y: ((0.01 * y).repeat(1, 100).bfloat16(), (0.001 * y.sigmoid()).repeat(1, 100).bfloat16()),
        {},
        "the model returned tuple with 0",
    ),
    "one number beside ones": (lambda y: (y[:, :1], y[:, :1] * 0 + 1), {"target": 0}, "the model returned tuple with 0"),
    "three heads": (lambda y: (y, y.softmax(-1), y), {}, "the model returned tuple with 0"),
    "other keys": (lambda y: {"scores": y, "aux": {"loss": y.sum()}}, {}, r"dict with scores \(1, 5\), aux\.loss \(\)"),
    "one number": (lambda y: y[:, :1], {}, r"the model returned \(1, 1\). Explain its only output"),
    "whole numbers": (lambda y: y.round().long(), {}, "needs floating-point outputs"),
    "probability of a regression": (
        lambda y: y,
        {"task": "regression", "target_space": "prob"},
        "numbers of a regression, which have no",
    ),
    "probability of an embedding": (
        lambda y: y,
        {"task": "embedding", "target": 1, "target_space": "prob"},
        "an embedding, which have no",
    ),
    "a name of nothing": (lambda y: y, {"target": "cat"}, "class names are unknown for this model"),
}


def said(made: Callable[[Tensor], Any], **told: Any) -> visattn.Provenance:
    return visattn.explain(Outputs(made).eval(), PHOTO, method="gradcam", layer="net.layer4", img_size=64, **told).provenance


@pytest.mark.parametrize("name", list(CASES))
def test_outputs_are_called_what_they_are(name: str) -> None:
    case = CASES[name]
    found = said(case.made, **case.told)
    (text,) = found.target
    assert text.startswith(case.begins)
    assert ("probability" in text.partition(";")[2]) is case.probability
    for score in found.scores:
        assert ("probability" in score) is case.probability
        if not case.probability:
            assert "class" not in text


@pytest.mark.parametrize("name", list(REFUSED))
def test_outputs_of_which_nothing_can_be_said_are_refused(name: str) -> None:
    made, told, message = REFUSED[name]
    with pytest.raises((OptionError, NoClasses), match=message):
        said(made, **told)


def test_probabilities_are_those_of_the_outputs() -> None:
    with torch.no_grad():
        outputs = Outputs(lambda y: y).eval()(visattn.prepare(PHOTO, Outputs(lambda y: y), img_size=64).pixels)[0].double()
    expected = {
        "softmax inside": outputs.softmax(-1)[4],
        "log-softmax inside": outputs.softmax(-1)[4],
        "sigmoid inside, of labels": outputs.sigmoid()[4],
        "multi-label": outputs.sigmoid()[4],
        "classes as the user says": outputs.softmax(-1)[4],
    }
    for name, probability in expected.items():
        (score,) = said(CASES[name].made, **CASES[name].told).scores
        assert score["probability"] == pytest.approx(float(probability), abs=1e-6)


@pytest.mark.parametrize(
    ("problem", "begins"),
    [
        ("single_label_classification", "logit of class "),
        ("multi_label_classification", "logit of label "),
        ("regression", "output "),
        (None, "output "),
    ],
)
def test_a_configuration_states_what_outputs_are(problem: str | None, begins: str) -> None:
    torch.manual_seed(0)
    config: Any = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=64, patch_size=16
    )
    config.num_labels, config.problem_type = 4, problem
    model: Any = ViTForImageClassification(config).eval()  # type: ignore[no-untyped-call]
    assert visattn.explain(model, PHOTO).provenance.target[0].startswith(begins)
    config.id2label = dict(enumerate("wxyz"))
    names = {"regression": " (output ", "multi_label_classification": " (label "}
    assert names.get(str(problem), " (class ") in visattn.explain(model, PHOTO).provenance.target[0]


def test_auto_explains_no_output_of_an_embedding() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=128, depth=2).eval()
    assert visattn.explain(model, PHOTO, task="embedding").provenance.method == "attention"


FILES = {
    "unknown": ("", "output ", False),
    "softmax": (".softmax(-1)", "probability of class ", True),
    "sigmoid": (".sigmoid()", "output ", False),
}


@pytest.mark.parametrize("name", list(FILES))
def test_command_line_json_and_picture_say_the_same(run: Run, photo: Path, name: str) -> None:
    change, begins, probability = FILES[name]
    Path("own.py").write_text(
        "import timm, torch\n"
        "class Own(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        torch.manual_seed(0)\n"
        "        self.net = timm.create_model('resnet10t', num_classes=5)\n"
        "    def forward(self, x):\n"
        f"        return (self.net(x) * 20){change}\n"
        "def build():\n"
        "    return Own()\n"
    )
    code, out, err = run("overlay", photo, "--model", "own.py:build", "--img-size", "64", "-o", "o.png", "--caption", "--json")
    assert code == 0
    (told,) = json.loads(out)
    (text,) = told["provenance"]["target"]
    stored = json.loads(Image.open("o.png").text["visattn"])  # type: ignore[attr-defined]
    assert text.startswith(begins)
    assert stored["target"] == [text]
    assert text in err
    assert ("probability" in told["provenance"]["scores"][0]) is probability
    code, out, _ = run(
        "overlay", photo, "--model", "own.py:build", "--img-size", "64", "-o", "p.png", "--task", "classes", "--json"
    )
    assert code == 0
    assert "class" in json.loads(out)[0]["provenance"]["target"][0]


def test_viewer_lists_classes_only_where_probabilities_are_known() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, depth=2).eval()
    unknown = visattn.study(model, PHOTO, methods=["relevance"])
    assert unknown[0].classes == ()
    assert "% of class" not in html_of(unknown)
    known = visattn.study(model, PHOTO, methods=["relevance"], labels=LETTERS)
    assert sum(one.probability for one in known[0].classes) == pytest.approx(1, abs=1e-5)
    assert {one.name for one in known[0].classes} == set(LETTERS)
    labels = visattn.study(model, PHOTO, methods=["relevance"], labels=LETTERS, task="multi_label")
    assert sum(one.probability for one in labels[0].classes) > 1.1


def test_weights_of_a_package_say_class_and_probability() -> None:
    (text,) = visattn.explain("tf_efficientnet_lite0", "photo:chelsea").provenance.target
    assert text.startswith("logit of tiger cat (class 282) = ")
    assert "this is the predicted class, with probability " in text
