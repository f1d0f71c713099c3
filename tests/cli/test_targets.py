"""Class-specific maps on the command line, and one-line errors about targets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_commands import COLORED, NAMED, TINY, Run, photo, run

__all__ = ["photo", "run"]

HEADLESS = ("--model", "vit_small_patch14_dinov2", *TINY[2:5], "56", *TINY[6:])


def test_class_given_by_name_is_reported_with_the_prediction(run: Run, photo: Path) -> None:
    code, out, err = run("overlay", photo, *TINY, "--target", "espresso", "--versus", "tabby", "--labels", "imagenet", "--json")
    facts = json.loads(out)[0]["provenance"]
    assert code == 0
    assert facts["method"] == "relevance"
    (told,) = facts["target"]
    assert told.startswith("logit of espresso (class 967) versus tabby (class 281) = ")
    assert "; the predicted class is " in told
    assert ", with probability " in told
    assert told in err


@pytest.mark.parametrize("method", ["relevance", "legrad", "gradient_rollout", "attention_gradient", "gradcam"])
def test_target_changes_the_overlay(run: Run, photo: Path, method: str) -> None:
    for target in ("0", "1"):
        assert run("overlay", photo, *TINY, "--method", method, "--target", target, "-o", f"{target}.png")[0] == 0
    assert Image.open("0.png").tobytes() != Image.open("1.png").tobytes()


OPTIONS = {
    "transition_attention": ["--steps", "3", "--start-layer", "10", "--target-space", "prob"],
    "rollout": ["--residual", "measured", "--weights-by", "norm", "--discard", "0.5", "--discard-over", "layer"],
    "norm_attention": ["--layer", "3", "--query", "patch:1,1"],
    "attention_flow": ["--residual", "0.4", "--start-layer", "10"],
    "attention_gradient": ["--signed", "--layer", "blocks.3.attn", "--head", "1"],
    "legrad": ["--last-layers", "2", "--target", "5"],
    "attention": ["--sinks", "drop"],
}


CHOICES = {
    "transition_attention": ".target_space_prob.start_layer_10.steps_3",
    "rollout": ".weights_by_norm.residual_measured.discard_0_5.discard_over_layer",
    "norm_attention": ".layer_3.patch_1_1",
    "attention_flow": ".residual_0_4.start_layer_10",
    "attention_gradient": ".layer_blocks_3_attn.head_1.signed",
    "legrad": ".target_5.last_layers_2",
    "attention": ".sinks_drop",
}


@pytest.mark.parametrize("method", list(OPTIONS))
def test_method_options_are_accepted(run: Run, photo: Path, method: str) -> None:
    code, out, _ = run("overlay", photo, *TINY, *COLORED, "--method", method, *OPTIONS[method], "--json")
    (entry,) = json.loads(out)
    assert code == 0
    assert entry["output"] == f"dog.{NAMED}.{method}{CHOICES[method]}.png"
    told = {name: str(value) for name, value in entry["provenance"]["parameters"].items()}
    given = (
        dict(zip(OPTIONS[method][::2], OPTIONS[method][1::2], strict=False))
        if method != "attention_gradient"
        else {"--head": "1"}
    )
    for name, value in given.items():
        key = name.lstrip("-").replace("-", "_")
        if not key.startswith("target") and key != "layer":
            assert told[key] == value


REFUSED = {
    "index": (["--target", "1000"], "target must be a class from 0 to 999, got 1000"),
    "name": (["--target", "expresso", "--labels", "imagenet"], "unknown class 'expresso'. Close matches: espresso"),
    "several": (["--target", "crane", "--labels", "imagenet"], "'crane' matches several classes: 134 (crane"),
    "no names": (["--target", "espresso"], "class names are unknown for this model, so 'espresso' cannot be looked up"),
    "not targeted": (["--method", "rollout", "--target", "3"], "method 'rollout' does not depend on a class"),
    "discard of 1": (["--method", "rollout", "--discard", "1"], "discard must be less than 1, got 1"),
    "residual": (["--method", "rollout", "--residual", "much"], "'much' is not one of: float, measured"),
    "not its option": (["--method", "relevance", "--discard", "0.5"], "method 'relevance' has no parameter 'discard'"),
    "start layer": (["--start-layer", "12"], "start_layer must lie in [0, 11], got 12"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_wrong_target_or_option_exits_with_code_2_and_a_one_line_error(run: Run, photo: Path, case: str) -> None:
    arguments, message = REFUSED[case]
    code, out, err = run("overlay", photo, *TINY, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert not list(photo.parent.glob("dog.*.png"))


def test_too_few_labels_are_refused(run: Run, photo: Path) -> None:
    Path("names.txt").write_text("tench\nespresso\n")
    code, _, err = run("overlay", photo, *TINY, "--labels", "names.txt")
    assert code == 2
    assert "labels must name 1000 classes, got 2. Give one name per line." in err


@pytest.mark.parametrize("method", ["relevance", "legrad", "gradcam", "transition_attention"])
def test_class_of_a_headless_model_is_refused_with_alternatives(run: Run, photo: Path, method: str) -> None:
    code, out, err = run("overlay", photo, *HEADLESS, "--method", method)
    assert (code, out) == (2, "")
    assert "has no classification head, so there is no class to explain. Use method 'attention' or 'rollout'" in err


def test_outlier_is_reported_and_percentile_scaling_shows_the_rest(run: Run, photo: Path) -> None:
    values = np.random.default_rng(0).random((60, 90)).astype(np.float32)
    values[30, 45] = 1e6
    np.save("m.npy", values)
    plain, clipped = (
        json.loads(run("overlay", photo, "--map", "m.npy", "--json", "-o", f"{how}.png", "--normalize", how)[1])[0]["provenance"]
        for how in ("minmax", "percentile")
    )
    assert (plain["normalization"], clipped["normalization"]) == ("minmax", "percentile")
    pictures = [np.asarray(Image.open(f"{how}.png")).astype(float) for how in ("minmax", "percentile")]
    photo_pixels = np.asarray(Image.open(photo).convert("RGB")).astype(float)
    differing = [float((np.abs(picture - photo_pixels).max(-1) > 0).mean()) for picture in pictures]
    assert differing[1] > 0.9
    assert float(np.abs(pictures[0][:10] - pictures[1][:10]).mean()) > 5
