"""Commands as a user runs them, with a small model and random weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visattn._support.extras import EXTRAS
from visattn.cli.commands import _run, cli
from visattn.cli.help import COMMANDS

Run = Callable[..., tuple[int, str, str]]
TINY = ("--model", "vit_tiny_patch16_224", "--weights", "none", "--img-size", "64", "--resize", "fit")
COLORED = ("--normalize", "minmax")  # a rollout of random weights is nearly even, and has no colors by default
NAMED = "vit_tiny_patch16_224.none"  # this model in names of outputs


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command in an empty folder and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = _run([str(argument) for argument in arguments], debug=False)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """Write a landscape photo of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    path = tmp_path / "dog.png"
    Image.fromarray(pixels).save(path)
    return path


def python(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **(environment or {})},
    )


def test_help_names_every_command_without_torch() -> None:
    code = "import sys; from visattn.cli import main\n"
    code += "try: main(['--help'])\nexcept SystemExit: print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "False False"
    assert all(name in done.stdout for name in COMMANDS)


def test_help_is_the_same_page_without_click(run: Run) -> None:
    code = "import sys; sys.argv = ['visattn', '-h']\nfrom visattn.cli import main; main(); print('click' in sys.modules)"
    page, _, last = python("-c", code).stdout.rstrip("\n").rpartition("\n")
    assert last == "False"
    assert run("--help")[1].rstrip("\n") == page
    assert all(len(line) <= 80 for line in page.splitlines())
    assert [line.split("  ")[1] for line in page.splitlines() if line.startswith("  -")] == ["--version", "-h, --help"]
    assert [option.opts for option in cli.params] == [["--version"]], "the page names every option"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(run: Run, name: str) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    assert out.startswith("Usage: visattn")


def test_overlay_has_the_size_of_the_photo_and_stores_its_provenance(run: Run, photo: Path) -> None:
    code, out, err = run("overlay", photo, *TINY)
    assert (code, out) == (0, f"dog.{NAMED}.overlay.png\n")
    with Image.open(f"dog.{NAMED}.overlay.png") as picture:
        assert picture.size == (90, 60)
        facts = json.loads(picture.info["visattn"])
    assert facts["random"] is True
    assert facts["weights"] == "random, seed 0"
    assert facts["geometry"]["photo"] == [60, 90]
    assert facts["normalization"] == "minmax"
    assert facts["value_range"][0] < facts["value_range"][1]
    assert "the weights are random" in err


def test_overlay_json_prints_only_the_provenance_on_stdout(run: Run, photo: Path) -> None:
    code, out, _ = run("overlay", photo, *TINY, *COLORED, "--method", "rollout", "--json")
    (entry,) = json.loads(out)
    assert code == 0
    assert entry["output"] == f"dog.{NAMED}.rollout.png"
    assert entry["provenance"]["method"] == "rollout"
    assert entry["provenance"]["parameters"]["query"] == "cls"


def test_overlay_opacity_zero_is_the_photo(run: Run, photo: Path) -> None:
    assert run("overlay", photo, *TINY, "--opacity", "0", "-o", "same.png")[0] == 0
    assert Image.open("same.png").tobytes() == Image.open(photo).tobytes()


def test_overlay_pixel_query_is_converted_to_its_patch(run: Run, photo: Path) -> None:
    _, out, _ = run("overlay", photo, *TINY, "--method", "similarity", "--query", "pixel:89,0", "--json")
    facts = json.loads(out)[0]["provenance"]
    across = facts["geometry"]["input"][1] // 16
    assert facts["parameters"]["query"] == f"patch:0,{across - 1}"


def test_overlay_gives_several_photos_unique_output_names(run: Run, photo: Path, tmp_path: Path) -> None:
    Image.open(photo).save(tmp_path / "dog.jpg")
    code, out, _ = run("overlay", photo, tmp_path / "dog.jpg", *TINY, "-o", "maps")
    assert code == 0
    assert out.splitlines() == [f"maps/dog.png.{NAMED}.overlay.png", f"maps/dog.jpg.{NAMED}.overlay.png"]


def test_overlay_of_equal_names_in_two_folders_writes_two_images(run: Run, photo: Path) -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        shutil.copy(photo, f"{folder}/x.png")
    code, out, _ = run("overlay", "a/x.png", "b/x.png", *TINY, "-o", "both")
    assert code == 0
    assert out.splitlines() == [f"both/1.x.png.{NAMED}.overlay.png", f"both/2.x.png.{NAMED}.overlay.png"]
    assert all(Path(line).is_file() for line in out.splitlines())


def test_equal_output_names_are_refused_before_work_starts(run: Run, photo: Path) -> None:
    code, out, err = run("overlay", photo, "--model", "no_such_model", "--save-map", "same.png", "-o", "./same.png")
    assert (code, out) == (2, "")
    assert "same.png: two results would be written to this file; choose another name for one of them" in err
    assert not Path("same.png").exists()


def test_saved_map_draws_the_same_overlay(run: Run, photo: Path) -> None:
    assert run("overlay", photo, *TINY, *COLORED, "--method", "rollout", "--save-map", "m.npz", "-o", "a.png")[0] == 0
    assert run("overlay", photo, *COLORED, "--map", "m.npz", "-o", "b.png")[0] == 0
    assert Image.open("a.png").tobytes() == Image.open("b.png").tobytes()


@pytest.mark.parametrize(
    "options",
    [(), ("--layer", "all"), ("--query", "patch:1,2", "--by-layer"), ("--layer", "3", "--head", "1", "--matrix")],
    ids=["last-layer", "all-layers", "one-query-through-layers", "matrix"],
)
def test_heads_writes_a_page(run: Run, photo: Path, options: tuple[str, ...]) -> None:
    code, out, _ = run("heads", photo, *TINY, *options)
    assert code == 0
    with Image.open(out.strip()) as page:
        assert min(page.size) > 200
        assert len(page.convert("RGB").getcolors(1 << 24) or []) > 100


@pytest.mark.parametrize(("layer", "rows"), [("-1", 3), ("all", 36)])
def test_heads_stats_writes_a_table(run: Run, photo: Path, layer: str, rows: int) -> None:
    code, out, _ = run("heads", photo, *TINY, "--layer", layer, "--stats", "--json")
    assert code == 0
    found = json.loads(out)
    assert len(found) == rows
    for row in found:
        assert 0 < row["entropy"] < np.log(row["effective_keys"]) + 1e-6  # the mean of exp is at least exp of the mean
        assert row["cls"] + row["self"] + row["patches"] + row["padding"] == pytest.approx(1, abs=1e-5)
        assert 0 < row["distance_px"] < 64 * 2**0.5
    code, out, _ = run("heads", photo, *TINY, "--layer", layer, "--stats")
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["layer", "head", "entropy"]
    assert len(lines) == rows + 1
    code, out, _ = run("heads", photo, *TINY, "--layer", layer, "--stats", "-o", "heads.csv")
    assert (code, out.strip()) == (0, "heads.csv")
    assert len(Path("heads.csv").read_text().splitlines()) == rows + 1


def test_heads_stats_reports_skipped_layers_and_random_weights(run: Run, photo: Path) -> None:
    cait = ("--model", "cait_xxs24_224", "--weights", "none", "--img-size", "64", "--resize", "fit")
    code, out, err = run("heads", photo, *cait, "--layer", "all", "--stats", "--json")
    assert code == 0
    assert {row["layer"] for row in json.loads(out)} == {"blocks_token_only.0.attn", "blocks_token_only.1.attn"}
    assert "visattn: layers left out because their attention rows do not sum to 1: blocks.0.attn, blocks.1.attn" in err
    assert "random" in err
    code, out, err = run("heads", photo, *cait, "--layer", "0", "--stats")
    assert (code, out) == (2, "")
    assert "--layer 0: its attention rows do not sum to 1. Choose another layer, or --layer all." in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stats", "--matrix"), "--matrix and --stats cannot be combined. Choose one."),
        (("--stats", "--query", "cls"), "--stats covers all queries of all heads. Leave --query and --head out."),
        (("--stats", "--opacity", "0.3"), "--opacity has no effect with --stats. Leave one of them out."),
        (("--steps", "--matrix"), "--matrix and --steps cannot be combined. Choose one."),
        (("--steps",), "--steps draws one head. Pass --layer N and --head N."),
        (("--steps", "--head", "mean"), "--steps draws one head. Pass --layer N and --head N."),
        (
            ("--steps", "--head", "0", "--shared-scale"),
            "--steps draws quantities of different units. Leave --mass and --shared-scale",
        ),
        (("--find", "hue", "--steps"), "--steps has no effect with --find"),
        (("--method", "gates", "--steps"), "--steps applies to attention heads only. Leave it out with --method gates."),
        (
            ("--matrix", "--layer", "0", "--head", "0", "--no-marks"),
            "--marks has no effect with --matrix. Leave one of them out.",
        ),
    ],
)
def test_heads_stats_refuses_options_without_effect(run: Run, photo: Path, options: tuple[str, ...], message: str) -> None:
    code, _, err = run("heads", photo, *TINY, *options)
    assert code == 2
    assert message in err
    assert not list(Path().glob("*.csv"))


def test_heads_steps_draws_them_and_says_what_the_scale_does(run: Run, photo: Path) -> None:
    code, out, err = run("heads", photo, *TINY, "--layer", "3", "--head", "1", "--query", "patch:1,2", "--steps")
    assert code == 0, err
    name = out.strip()
    assert name == f"{photo.stem}.vit_tiny_patch16_224.none.steps.layer_3.head_1.patch_1_2.png"
    assert "variance over all pairs: " in err
    assert "of the scaled ones (scale 0.125, width 64)" in err
    assert "entropy of the weights, mean over all queries: " in err
    with Image.open(name) as page:
        assert page.width > 5 * 300
    code, _, err = run("heads", photo, *TINY, "--head", "0", "--query", "mean", "--steps")
    assert code == 2
    assert "steps are those of one query token" in err


def test_contour_levels_and_marks_are_stored_in_the_provenance(run: Run, photo: Path) -> None:
    code, out, err = run("overlay", photo, *TINY, "--contours", "0.5", "--contours", "0.8", "--no-marks", "--json")
    assert code == 0, err
    drawing = json.loads(out)[0]["provenance"]["drawing"]
    assert (drawing["contours"], drawing["marks"]) == ([0.5, 0.8], False)


def test_inspect_lists_layers_and_methods(run: Run) -> None:
    code, out, _ = run("inspect", "vit_tiny_patch16_224", "--json")
    facts = json.loads(out)
    assert code == 0
    assert len(facts["layers"]) == 12
    first = facts["layers"][0]
    assert first.pop("error") < 1e-5
    assert first == {
        "layer": "blocks.0.attn",
        "call": 0,
        "kind": "self",
        "heads": 3,
        "queries": 197,
        "keys": 197,
        "query_grid": [14, 14],
        "grid": [14, 14],
        "holes": 0,
        "prefix": ["cls"],
        "windows": 1,
        "reason": None,
    }
    assert {row["method"]: row["applies"] for row in facts["methods"]}["rollout"] == "yes"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("swin_tiny_patch4_window7_224", ["56 x 56", "64 ", "rollout layers.0.blocks.1.attn (56 x 56) and"]),
        (
            "xcit_nano_12_p16_224",
            ["channel", "pool", "cls + 14 x 14", "rollout there is no self-attention to multiply"],
        ),
        ("lambda_resnet26t", ["unplaced", "no weight belongs to a pair of tokens", "attention stages.2.1.self_attn"]),
    ],
)
def test_inspect_shows_attention_kinds_and_why_a_method_does_not_apply(run: Run, name: str, shown: list[str]) -> None:
    code, out, _ = run("inspect", name)
    assert code == 0
    words = " ".join(out.split())
    for text in shown:
        assert " ".join(text.split()) in words


def test_list_finds_models_by_pattern(run: Run) -> None:
    code, out, _ = run("list", "*dinov2*")
    assert code == 0
    assert "vit_small_patch14_dinov2.lvd142m" in out.splitlines()


def test_list_methods_and_colormaps(run: Run) -> None:
    assert "rollout" in run("list", "--methods")[1]
    assert run("list", "--colormaps")[1].splitlines()[0] == "inferno"


def test_doctor_checks_requirements(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    states = {row["check"]: row["state"] for row in json.loads(out)}
    assert code == 0
    assert states["opencv"] == states["torch"] == states["cache"] == "ok"


def test_doctor_names_extras_and_networks_that_are_missing(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "visattn._support.extras.find_spec", lambda module: None if module in ("av", "visattn_networks") else object()
    )
    monkeypatch.setattr("visattn.core.loading.networks._CHECKOUT", tmp_path)
    code, out, _ = run("doctor", "--json")
    found = {row["check"]: (row["state"], row["detail"]) for row in json.loads(out)}
    assert code == 0
    assert found["extras"] == (
        "absent",
        'not installed: video (av). In the source folder of visattn, run: pip install -e ".[NAME]"',
    )
    assert found["small networks"][0] == "absent"
    assert 'pip install -e ".[networks]"' in found["small networks"][1]


def test_doctor_knows_every_extra() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(declared) - {"all", "dev", "docs", "networks", "ultralytics"}


def test_doctor_explains_a_build_of_pytorch_without_cuda(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    assert "CPU only: this build of PyTorch has no CUDA" in run("doctor", "--imports")[1]


def test_doctor_uses_the_network_only_with_the_option(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reached(name: str) -> str:
        asked.append(name)
        return name

    monkeypatch.setattr("visattn.core.loading.timm_models.reach_hub", reached)
    code, out, _ = run("doctor")
    assert (code, asked) == (0, [])
    assert "model hub" in out
    assert "not checked" in out
    assert "--network" in out
    assert "not checked" not in run("doctor", "--network", "--imports")[1]
    assert len(asked) == 1


def test_a_matrix_states_the_layer_that_it_is_of(run: Run) -> None:
    pooled = "vit_base_patch16_siglip_224", "--weights", "none", "--img-size", "64"
    code, out, err = run("heads", "photo:coffee", "--model", *pooled, "--head", "0", "--matrix", "--json")
    assert code == 0, err
    (made,) = json.loads(out)
    assert made["provenance"]["parameters"] == {"layer": "blocks.11.attn", "head": "0", "query": "all"}
    assert made["provenance"]["method"] == "attention"
