"""Targets that `visattn inspect` lists: each example runs as it stands, and what a model does not have is not listed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import AnchorGenerator

import visattn
from tests.cli.test_commands import Run, photo, run
from tests.pipeline.test_output_numbers import Net
from tests.pipeline.test_places import detr
from tests.pipeline.test_prompts import saved
from visattn.core.pipeline.embeddings import with_words
from visattn.core.pipeline.passes import answer_of
from visattn.core.pipeline.target_choices import choices_of, queries_of

__all__ = ["photo", "run"]

PHOTO = "photo:chelsea"


def vit_of_transformers(labels: int, problem: str) -> Any:
    settings: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    settings |= {"image_size": 32, "patch_size": 8, "num_labels": labels, "problem_type": problem}
    config = transformers.ViTConfig(**settings)
    torch.manual_seed(0)
    model: Any = transformers.ViTForImageClassification(config)
    return model.eval()


def detector() -> nn.Module:
    """Return Faster R-CNN of torchvision on a small backbone."""
    torch.manual_seed(0)
    body: Any = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    body.out_channels = 8
    anchors = AnchorGenerator(((16, 32),), ((1.0,),))
    pool: Any = torchvision.ops.MultiScaleRoIAlign(["0"], 3, 2)
    sizes: dict[str, Any] = {"min_size": 64, "max_size": 96, "box_score_thresh": 0.0, "box_detections_per_img": 5}
    predictor: dict[str, Any] = {"box_head": TwoMLPHead(8 * 9, 16), "box_predictor": FastRCNNPredictor(16, 4)}
    model: Any = FasterRCNN(body, rpn_anchor_generator=anchors, box_roi_pool=pool, **sizes, **predictor)
    model.img_size = 64
    return model.eval()  # type: ignore[no-any-return]


def dense() -> nn.Module:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    model.img_size = 64
    return model.eval()  # type: ignore[no-any-return]


KINDS: dict[str, tuple[Callable[[Path], Any], str, set[str]]] = {  # a model, a method, and the kinds that it takes
    "classes": (lambda _: vit_of_transformers(3, "single_label_classification"), "relevance", {"class", "output"}),
    "labels": (lambda _: vit_of_transformers(3, "multi_label_classification"), "relevance", {"label", "output"}),
    "regression": (lambda _: vit_of_transformers(2, "regression"), "relevance", {"output"}),
    "unknown": (lambda _: Net(4).eval(), "gradcam", {"class", "label", "output", "similar"}),
    "one logit": (lambda _: Net(1).eval(), "gradcam", {"label", "output"}),
    "probabilities": (lambda _: Net(4, lambda out: out.softmax(1)).eval(), "gradcam", {"class", "output"}),
    "embedding": (lambda _: timm.create_model("test_vit", num_classes=0).eval(), "relevance", {"output", "similar"}),
    "images and texts": (lambda folder: saved(folder / "clip"), "relevance", {"text", "similar"}),
    "detector": (lambda _: detector(), "gradcam", {"box"}),
    "detection transformer": (lambda _: detr(), "relevance", {"query"}),  # none of its random boxes has more than one half
    "segmentation": (lambda _: dense(), "gradcam", {"pixel", "mask"}),
}


def seen(model: Any) -> Any:
    prepared = with_words(model, visattn.prepare(PHOTO, model))
    with torch.no_grad():
        return prepared, answer_of(model, prepared.pixels, prepared)


@pytest.mark.parametrize("name", KINDS)
def test_each_example_runs_and_no_other_kind_is_listed(name: str, tmp_path: Path) -> None:
    build, method, kinds = KINDS[name]
    model = build(tmp_path)
    choices = choices_of(model, *seen(model))
    assert {choice.example.partition(":")[0] for choice in choices} == kinds
    for choice in choices:
        made = visattn.explain(model, PHOTO, method=method, target=choice.example)
        assert len(made.provenance.target) == 1


def test_what_is_told_of_a_class_is_that_of_the_output() -> None:
    model = vit_of_transformers(3, "single_label_classification")
    prepared, output = seen(model)
    (choice,) = (one for one in choices_of(model, prepared, output) if one.example.startswith("class:"))
    assert choice.example == f"class:{int(output.logits[0].argmax())}"
    assert "3 classes" in choice.what


def test_both_kinds_are_offered_with_the_reason_if_nothing_tells_which() -> None:
    model = Net(4).eval()
    choices = {one.example: one.what for one in choices_of(model, *seen(model))}
    assert "task='classes'" in next(what for example, what in choices.items() if example.startswith("class:"))
    assert "task='multi_label'" in next(what for example, what in choices.items() if example.startswith("label:"))


def test_the_boxes_are_counted_on_this_photo_and_none_is_offered_without_one() -> None:
    model = detector()
    prepared, output = seen(model)
    (choice,) = choices_of(model, prepared, output)
    assert f"{len(output[0]['boxes'])} detections" in choice.what
    none = [{name: value[:0] for name, value in output[0].items()}]
    assert choices_of(model, prepared, none) == []


@pytest.mark.parametrize(
    "build", [lambda: timm.create_model("test_vit").eval(), detr, lambda: timm.create_model("test_vit2").eval()]
)
def test_each_query_draws_attention(build: Callable[[], Any]) -> None:
    model = build()
    prepared, _ = seen(model)
    with torch.no_grad(), visattn.capture(model) as recording:
        model(prepared.pixels)
    choices = queries_of(recording)
    assert choices
    for choice in choices:
        assert visattn.explain(model, PHOTO, method="attention", query=choice.example).map.values.any()


def test_the_command_lists_examples_that_the_command_draws(run: Run, photo: Path) -> None:
    Path("own.py").write_text("from tests.pipeline.test_target_choices import detector\n\ndef build():\n    return detector()\n")
    code, out, err = run("inspect", "own.py:build", photo, "--json")
    assert code == 0, err
    (target,) = json.loads(out)["targets"]
    code, out, err = run(
        "overlay",
        photo,
        "--model",
        "own.py:build",
        "--method",
        "gradcam",
        f"--{target['option']}",
        target["example"],
        "-o",
        "o.png",
    )
    assert code == 0, err
    code, out, _ = run("inspect", "own.py:build")
    assert code == 0
    assert "--target box:N" in out
    assert "PHOTO" in out
