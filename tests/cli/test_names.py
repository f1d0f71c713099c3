"""Default names of outputs: one for each model, safe as a part of a file name, and the plain one for the default model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm

from tests.cli.test_commands import COLORED, TINY, Run, photo, run
from visattn.core.command_line.questions import model_of, short_name
from visattn.core.command_line.shared_options import DEFAULT_MODEL

__all__ = ["photo", "run"]

NAMES = {
    "resnet50": "resnet50",
    "vit_base_patch16_224.mae": "vit_base_patch16_224_mae",
    "tv:resnet50": "tv_resnet50",
    "tv:resnet50.IMAGENET1K_V1": "tv_resnet50_IMAGENET1K_V1",
    "hf:facebook/dinov2-small": "hf_facebook_dinov2-small",
    "hf:facebook/dinov2-small@refs/pr/1": "hf_pr_1",
    "hf:/home/me/saved/model": "hf_saved_model",
    "clip:ViT-B-32.openai": "clip_ViT-B-32_openai",
    "my_model.py:make": "my_model_py_make",
    "../code/my_model.py:make": "code_my_model_py_make",
    "runs/first/final": "first_final",
    "runs/second/final/": "second_final",
    "./final": "final",
    "Löwe": "Löwe",
    "a\nb\x1b[31m\x00c": "a_b_31m_c",
    "../../..": "model",
    "": "model",
    os.fsdecode(b"bad\xff"): "bad",
}


@pytest.mark.parametrize(("source", "name"), NAMES.items(), ids=range(len(NAMES)))
def test_short_names(source: str, name: str) -> None:
    assert short_name(source) == name
    assert re.fullmatch(r"[\w-]{1,40}", name)


def test_long_names_differ_if_their_models_do() -> None:
    tags = ("augreg_in21k_ft_in1k", "augreg_in21k_ft_in1k_384", "augreg_in21k_ft_in2k")
    names = [short_name(f"vit_tiny_patch16_224.{tag}") for tag in tags]
    assert len({*names}) == 3
    for name in names:
        assert re.fullmatch(r"vit_tiny_patch16_224_augreg_in21k_[0-9a-f]{6}", name)
        assert len(name) <= 40


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, ""),
        ({"seed": 3}, ""),
        ({"weights": "none"}, "vit_small_patch14_dinov2_lvd142m.none."),
        ({"weights": "none", "seed": 3}, "vit_small_patch14_dinov2_lvd142m.none_seed_3."),
        ({"model": "resnet50"}, "resnet50."),
        ({"model": "resnet50", "weights": "runs/mine.safetensors"}, "resnet50.runs_mine_safetensors."),
    ],
    ids=str,
)
def test_the_model_is_named_unless_it_is_the_default_one(options: dict[str, Any], part: str) -> None:
    assert model_of({"model": DEFAULT_MODEL, "weights": "auto", "seed": 0} | options) == part


def test_two_models_write_two_pictures(run: Run, photo: Path, tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "mine.safetensors")
    sized = ("--img-size", "64", "--resize", "fit")
    made = {
        "dog.vit_tiny_patch16_224.none.rollout.png": TINY,
        "dog.vit_tiny_patch16_224.none_seed_1.rollout.png": (*TINY, "--seed", "1"),
        "dog.deit_tiny_patch16_224.none.rollout.png": ("--model", "deit_tiny_patch16_224", "--weights", "none", *sized),
        "dog.vit_tiny_patch16_224.mine_safetensors.rollout.png": (*TINY[:2], "--weights", "mine.safetensors", *sized),
        "dog.scenes_vit.rollout.png": ("--model", "scenes_vit"),
    }
    for name, model_options in made.items():
        code, out, err = run("overlay", photo, *model_options, *COLORED, "--method", "rollout")
        assert (code, out) == (0, f"{name}\n"), err
    assert run("overlay", photo, *TINY, *COLORED, "--method", "rollout")[0] == 2, "the same model replaces nothing"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("overlay", "dog.overlay.png"),
        ("heads", "dog.heads.png"),
        ("view", "dog.view.html"),
        ("video", "dog.overlay.mp4"),
    ],
)
def test_names_of_the_default_model_stay_plain(command: str, name: str, run: Run, photo: Path) -> None:
    Path(name).write_text("mine")
    code, _, err = run(command, photo)
    assert code == 2
    assert err.startswith(f"visattn: error: {name}: exists already;")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("heads",), "dog.vit_tiny_patch16_224.none.heads.png"),
        (("heads", "--layer", "all"), "dog.vit_tiny_patch16_224.none.grid.png"),
        (("heads", "--layer", "1"), "dog.vit_tiny_patch16_224.none.heads.layer_1.png"),
        (("heads", "--query", "patch:1,2"), "dog.vit_tiny_patch16_224.none.heads.patch_1_2.png"),
        (("heads", "--layer", "2", "--head", "1", "--matrix"), "dog.vit_tiny_patch16_224.none.matrix.layer_2.head_1.png"),
        (("overlay", "--method", "attention", "--query", "patch:1,2"), "dog.vit_tiny_patch16_224.none.attention.patch_1_2.png"),
        (
            ("overlay", "--method", "rollout", "--fusion", "max", "--discard", "0.9"),
            "dog.vit_tiny_patch16_224.none.rollout.fusion_max.discard_0_9.png",
        ),
        (("view", "--methods", "rollout"), "dog.vit_tiny_patch16_224.none.view.html"),
        (("video", "--walk", "2", "--method", "attention"), "dog.vit_tiny_patch16_224.none.attention.mp4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_other_commands_name_the_model(command: tuple[str, ...], name: str, run: Run, photo: Path) -> None:
    code, out, err = run(command[0], photo, *TINY, *command[1:])
    assert (code, out) == (0, f"{name}\n"), err


def test_a_comparison_names_both_models(run: Run, photo: Path) -> None:
    both = ("--model", "scenes_vit", "--compare", "scenes_vit_shortcut")
    code, out, err = run("view", photo, *both, "--methods", "rollout")
    assert (code, out) == (0, "dog.scenes_vit.compare_scenes_vit_shortcut.view.html\n"), err
