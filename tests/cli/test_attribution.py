"""Attributions from the command line; the models are random, their pictures say so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.cli.test_commands import TINY, Run, photo, run  # noqa: F401 - fixtures
from visattn import data

CNN = ("--model", "tf_efficientnet_lite0", "--weights", "none", "--device", "cpu")
FEW = ("--cells", "2", "3", "--evaluations", "16")


def facts(picture: str) -> dict[str, Any]:
    with Image.open(picture) as drawn:
        found: dict[str, Any] = json.loads(drawn.info["visattn"])
    return found


def test_a_model_without_attention_is_explained(run: Run, photo: Path) -> None:  # noqa: F811
    code, out, err = run("overlay", photo, *CNN, "--method", "captum.kernel_shap", *FEW, "--baseline", "mean")
    assert (code, out) == (0, "dog.captum.kernel_shap.png\n")
    made = facts("dog.captum.kernel_shap.png")
    assert made["method"] == "captum.kernel_shap"
    assert made["parameters"] == {
        "segments": "grid 2 x 3",
        "baseline": "mean",
        "evaluations": 16,
        "seed": 0,
        "interpolation": "bilinear",
    }
    assert made["normalization"] == "symmetric"
    assert made["target"][0].startswith("logit of ")
    for text in ("18 evaluations of the model", "values sum to", "is uncertain by", "0, 0, 0 after normalization"):
        assert text in err


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("saliency", ("--signed",)),
        ("input_x_gradient", ("--segments", "grid", "--count", "6")),
        ("ig", ("--evaluations", "3", "--batch-size", "2")),
        ("smoothgrad", ("--evaluations", "3", "--noise", "0.1")),
        ("occlusion", ("--count", "6")),
        ("shap", ("--evaluations", "20", "--count", "6")),
        ("lime", (*FEW, "--lasso", "0", "--baseline", "black", "--target", "7", "--target-space", "prob")),
    ],
)
def test_each_goes_by_its_short_name_on_a_vit(method: str, options: tuple[str, ...], run: Run, photo: Path) -> None:  # noqa: F811
    code, out, _ = run("overlay", photo, *TINY, "--method", method, *options)
    assert (code, out) == (0, f"dog.{method}.png\n")
    assert facts(f"dog.{method}.png")["method"].startswith("captum.")


def test_slic_divides_a_photo(run: Run, tmp_path: Path) -> None:  # noqa: F811
    shutil.copy(data.photo_path("coffee"), tmp_path / "coffee.png")
    options = ("--method", "captum.lime", "--segments", "slic", "--count", "10", "--evaluations", "30", "--save-map", "map.npz")
    assert run("overlay", "coffee.png", *CNN, *options)[0] == 0
    assert facts("coffee.captum.lime.png")["parameters"]["segments"].startswith("slic ")
    assert run("overlay", "coffee.png", "--map", "map.npz", "-o", "again.png")[0] == 0
    with Image.open("coffee.captum.lime.png") as first, Image.open("again.png") as again:
        assert first.tobytes() == again.tobytes()


def test_the_seed_decides(run: Run, photo: Path) -> None:  # noqa: F811
    torch.manual_seed(1)
    for seed, name in (("1", "a"), ("1", "b"), ("2", "c")):
        torch.rand(3)
        options = ("--method", "shap", *FEW, "--weights", "weights.safetensors", "--seed", seed, "-o", f"{name}.png")
        if not Path("weights.safetensors").exists():
            import safetensors.torch
            import timm

            safetensors.torch.save_file(
                timm.create_model("vit_tiny_patch16_224", img_size=64).state_dict(), "weights.safetensors"
            )
        tiny = [word for word in TINY if word not in ("--weights", "none")]
        code, _, err = run("overlay", photo, *tiny, *options)
        assert code == 0, err
    a, b, c = (facts(f"{name}.png")["value_range"] for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "captum.smoothgrad", "--segments", "grid"), "method 'captum.smoothgrad' has no parameter 'segments'"),
        (("--method", "captum.occlusion", "--evaluations", "9"), "has no parameter 'evaluations'. It has: baseline, segments"),
        (("--method", "captum.saliency", "--evaluations", "9"), "has no parameter 'evaluations'. It has: signed"),
        (("--method", "captum.smoothgrad", "--noise", "0"), "Without noise it is captum.saliency."),
        (("--method", "captum.occlusion", "--segments", "pixels"), "segments must be 'grid' or 'slic'"),
        (("--method", "captum.lime", "--evaluations", "9", "--cells", "3", "3"), "evaluations must be at least 11"),
        (("--method", "captum.shap"), "unknown method 'captum.shap'; did you mean 'captum.kernel_shap'?"),
        (("--method", "attention", "--segments", "slic"), "method 'attention' has no parameter 'segments'"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else "",
)
def test_what_makes_no_sense_is_one_line(options: tuple[str, ...], message: str, run: Run, photo: Path) -> None:  # noqa: F811
    code, out, err = run("overlay", photo, *TINY, *options)
    assert (code, out) == (2, "")
    assert err.startswith("visattn: error: ")
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_model_without_classes_is_refused_in_one_line(run: Run, photo: Path) -> None:  # noqa: F811
    headless = ("--model", data.OFFLINE_MODEL, "--weights", "none", "--img-size", "56")
    code, _, err = run("overlay", photo, *headless, "--method", "captum.lime")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "has no classification head, so there is no class to explain" in err


def test_a_missing_extra_is_one_line(run: Run, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("visattn._support.extras.find_spec", lambda name: None)
    code, _, err = run("overlay", photo, *TINY, "--method", "captum.lime")
    line = 'captum.lime needs captum, which is not installed. Run: pip install "visattn[attribution]"'
    assert (code, err) == (2, f"visattn: error: {line}\n")


def test_they_are_in_the_list_of_methods(run: Run) -> None:  # noqa: F811
    _, out, _ = run("list", "--methods")
    (line,) = [line for line in out.splitlines() if line.startswith("captum.kernel_shap")]
    assert "score" in line
    assert "shap" in line
    assert "Shapley values" in line
    assert {"captum.saliency", "captum.input_x_gradient"} <= {line.split()[0] for line in out.splitlines() if line}
