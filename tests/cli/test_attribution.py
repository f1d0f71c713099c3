"""Attributions on the command line, with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.cli.test_commands import NAMED, TINY, Run, photo, run  # noqa: F401 - fixtures
from visattn import data

CNN = ("--model", "tf_efficientnet_lite0", "--weights", "none", "--device", "cpu")
FEW = ("--grid-size", "2", "3", "--samples", "16")


def facts(picture: str) -> dict[str, Any]:
    with Image.open(picture) as drawn:
        found: dict[str, Any] = json.loads(drawn.info["visattn"])
    return found


def test_a_model_without_attention_is_explained(run: Run, photo: Path) -> None:  # noqa: F811
    code, out, err = run(
        "overlay", photo, *CNN, "--method", "captum.kernel_shap", *FEW, "--baseline", "mean", "--task", "classes"
    )
    name = "dog.tf_efficientnet_lite0.none.captum.kernel_shap.grid_size_2_3.baseline_mean.samples_16.png"
    assert (code, out) == (0, f"{name}\n")
    made = facts(name)
    assert made["method"] == "captum.kernel_shap"
    assert made["parameters"] == {
        "segments": "grid 2 x 3",
        "baseline": "mean",
        "samples": 16,
        "seed": 0,
        "interpolation": "bilinear",
    }
    assert made["normalization"] == "symmetric"
    assert made["target"][0].startswith("logit of ")
    for text in ("18 evaluations of the model", "values sum to", "a standard error of", "0, 0, 0 after normalization"):
        assert text in err


@pytest.mark.parametrize(
    ("method", "options", "named"),
    [
        ("saliency", ("--signed",), "signed"),
        ("input_x_gradient", ("--segments", "grid", "--num-segments", "6"), "segments_grid.num_segments_6"),
        ("ig", ("--steps", "3", "--batch-size", "2"), "steps_3.batch_size_2"),
        ("smoothgrad", ("--samples", "3", "--noise", "0.1"), "noise_0_1.samples_3"),
        ("occlusion", ("--num-segments", "6"), "num_segments_6"),
        ("shap", ("--samples", "20", "--num-segments", "6"), "num_segments_6.samples_20"),
        (
            "lime",
            (*FEW, "--l1", "0.0", "--baseline", "black", "--target", "7", "--target-space", "prob"),
            "target_7.target_space_prob.grid_size_2_3.baseline_black.samples_16.l1_0_0",
        ),
    ],
)
def test_short_method_names_work_on_a_vit(
    method: str,
    options: tuple[str, ...],
    named: str,
    run: Run,  # noqa: F811
    photo: Path,  # noqa: F811
) -> None:
    code, out, _ = run("overlay", photo, *TINY, "--method", method, *options)
    name = f"dog.{NAMED}.{method}.{named}.png"
    assert (code, out) == (0, f"{name}\n")
    assert facts(name)["method"].startswith("captum.")


def test_slic_segments_a_photo(run: Run, tmp_path: Path) -> None:  # noqa: F811
    shutil.copy(data.photo_path("coffee"), tmp_path / "coffee.png")
    options = (
        "--method",
        "captum.lime",
        "--segments",
        "slic",
        "--num-segments",
        "10",
        "--samples",
        "30",
        "--save-map",
        "map.npz",
    )
    code, out, _ = run("overlay", "coffee.png", *CNN, *options)
    assert code == 0
    assert facts(out.strip())["parameters"]["segments"].startswith("slic ")
    assert run("overlay", "coffee.png", "--map", "map.npz", "-o", "again.png")[0] == 0
    with Image.open(out.strip()) as first, Image.open("again.png") as again:
        assert first.tobytes() == again.tobytes()


def test_result_depends_on_the_seed(run: Run, photo: Path) -> None:  # noqa: F811
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
        (("--method", "captum.occlusion", "--samples", "9"), "has no parameter 'samples'. It has: baseline, segments"),
        (("--method", "captum.saliency", "--samples", "9"), "has no parameter 'samples'. It has: signed"),
        (("--method", "captum.smoothgrad", "--noise", "0"), "Use captum.saliency for no noise."),
        (("--method", "captum.occlusion", "--segments", "pixels"), "segments must be 'grid' or 'slic'"),
        (("--method", "captum.lime", "--samples", "9", "--grid-size", "3", "3"), "samples must be at least 11"),
        (("--method", "captum.shap"), "unknown method 'captum.shap'; did you mean 'captum.kernel_shap'?"),
        (("--method", "attention", "--segments", "slic"), "method 'attention' has no parameter 'segments'"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else "",
)
def test_invalid_options_give_a_one_line_error(options: tuple[str, ...], message: str, run: Run, photo: Path) -> None:  # noqa: F811
    code, out, err = run("overlay", photo, *TINY, *options)
    assert (code, out) == (2, "")
    assert err.startswith("visattn: error: ")
    assert len(err.splitlines()) == 1
    assert message in err


def test_model_without_classes_gives_a_one_line_error(run: Run, photo: Path) -> None:  # noqa: F811
    headless = ("--model", data.OFFLINE_MODEL, "--weights", "none", "--img-size", "56")
    code, _, err = run("overlay", photo, *headless, "--method", "captum.lime")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "has no classification head, so there is no class to explain" in err


def test_missing_extra_gives_a_one_line_error(run: Run, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("visattn._support.extras.find_spec", lambda name: None)
    code, _, err = run("overlay", photo, *TINY, "--method", "captum.lime")
    line = (
        'captum.lime needs captum, which is not installed. In the source folder of visattn, run: pip install -e ".[attribution]"'
    )
    assert (code, err) == (2, f"visattn: error: {line}\n")


def test_attribution_methods_are_listed(run: Run) -> None:  # noqa: F811
    _, out, _ = run("list", "--methods")
    (line,) = [line for line in out.splitlines() if line.startswith("captum.kernel_shap")]
    assert "score" in line
    assert "shap" in line
    assert "Shapley values" in line
    assert {"captum.saliency", "captum.input_x_gradient"} <= {line.split()[0] for line in out.splitlines() if line}
