"""The commands, run as a user runs them; the model is small and random, its pictures say so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visattn.cli.commands import COMMANDS, _run

Run = Callable[..., tuple[int, str, str]]
TINY = ("--model", "vit_tiny_patch16_224", "--weights", "none", "--img-size", "64", "--resize", "fit")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in an empty folder: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = _run([str(argument) for argument in arguments], debug=False)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A landscape photo of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    path = tmp_path / "dog.png"
    Image.fromarray(pixels).save(path)
    return path


def python(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **(environment or {})},
    )


def test_help_names_every_command_without_torch() -> None:
    code = "import sys; from visattn.cli import main\n"
    code += "try: main(['--help'])\nexcept SystemExit: print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "False False"
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(run: Run, name: str) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    assert out.startswith("Usage: visattn")


def test_overlay_writes_a_picture_of_the_photos_size_that_knows_how_it_was_made(run: Run, photo: Path) -> None:
    code, out, err = run("overlay", photo, *TINY)
    assert (code, out) == (0, "dog.overlay.png\n")
    with Image.open("dog.overlay.png") as picture:
        assert picture.size == (90, 60)
        facts = json.loads(picture.info["visattn"])
    assert facts["random"] is True
    assert facts["weights"] == "random, seed 0"
    assert facts["geometry"]["photo"] == [60, 90]
    assert facts["normalization"] == "minmax"
    assert facts["value_range"][0] < facts["value_range"][1]
    assert "the weights are random" in err


def test_overlay_json_holds_the_provenance_on_stdout_alone(run: Run, photo: Path) -> None:
    code, out, _ = run("overlay", photo, *TINY, "--method", "rollout", "--json")
    (entry,) = json.loads(out)
    assert code == 0
    assert entry["output"] == "dog.rollout.png"
    assert entry["provenance"]["method"] == "rollout"
    assert entry["provenance"]["parameters"]["query"] == "cls"


def test_overlay_opacity_zero_is_the_photo(run: Run, photo: Path) -> None:
    assert run("overlay", photo, *TINY, "--opacity", "0", "-o", "same.png")[0] == 0
    assert Image.open("same.png").tobytes() == Image.open(photo).tobytes()


def test_overlay_pixel_query_becomes_its_patch(run: Run, photo: Path) -> None:
    _, out, _ = run("overlay", photo, *TINY, "--method", "similarity", "--query", "pixel:89,0", "--json")
    facts = json.loads(out)[0]["provenance"]
    across = facts["geometry"]["input"][1] // 16
    assert facts["parameters"]["query"] == f"patch:0,{across - 1}"


def test_overlay_several_photos_into_a_folder_never_two_alike(run: Run, photo: Path, tmp_path: Path) -> None:
    Image.open(photo).save(tmp_path / "dog.jpg")
    code, out, _ = run("overlay", photo, tmp_path / "dog.jpg", *TINY, "-o", "maps")
    assert code == 0
    assert out.splitlines() == ["maps/dog.png.overlay.png", "maps/dog.jpg.overlay.png"]


def test_overlay_of_like_names_in_two_folders_writes_two_pictures(run: Run, photo: Path) -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        shutil.copy(photo, f"{folder}/x.png")
    code, out, _ = run("overlay", "a/x.png", "b/x.png", *TINY, "-o", "both")
    assert code == 0
    assert out.splitlines() == ["both/1.x.png.overlay.png", "both/2.x.png.overlay.png"]
    assert all(Path(line).is_file() for line in out.splitlines())


def test_two_results_of_one_name_are_refused_before_work_starts(run: Run, photo: Path) -> None:
    code, out, err = run("overlay", photo, "--model", "no_such_model", "--save-map", "same.png", "-o", "./same.png")
    assert (code, out) == (2, "")
    assert "same.png: two results would be written there; choose another name for one" in err
    assert not Path("same.png").exists()


def test_saved_map_draws_the_same_picture(run: Run, photo: Path) -> None:
    assert run("overlay", photo, *TINY, "--method", "rollout", "--save-map", "m.npz", "-o", "a.png")[0] == 0
    assert run("overlay", photo, "--map", "m.npz", "-o", "b.png")[0] == 0
    assert Image.open("a.png").tobytes() == Image.open("b.png").tobytes()


@pytest.mark.parametrize(
    "options",
    [(), ("--layer", "all"), ("--query", "patch:1,2", "--layers"), ("--layer", "3", "--head", "1", "--matrix")],
    ids=["last-layer", "wall", "one-query-through-layers", "matrix"],
)
def test_heads_writes_a_page(run: Run, photo: Path, options: tuple[str, ...]) -> None:
    code, out, _ = run("heads", photo, *TINY, *options)
    assert code == 0
    with Image.open(out.strip()) as page:
        assert min(page.size) > 200
        assert len(page.convert("RGB").getcolors(1 << 24) or []) > 100


@pytest.mark.parametrize(("layer", "rows"), [("-1", 3), ("all", 36)])
def test_heads_in_numbers(run: Run, photo: Path, layer: str, rows: int) -> None:
    code, out, _ = run("heads", photo, *TINY, "--layer", layer, "--stats", "--json")
    assert code == 0
    found = json.loads(out)
    assert len(found) == rows
    for row in found:
        assert 0 < row["entropy"] < np.log(row["effective_keys"]) + 1e-6  # the mean of exp is above exp of the mean
        assert row["cls"] + row["self"] + row["patches"] + row["padding"] == pytest.approx(1, abs=1e-5)
        assert 0 < row["distance_px"] < 64 * 2**0.5
    code, out, _ = run("heads", photo, *TINY, "--layer", layer, "--stats")
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["layer", "head", "entropy"]
    assert len(lines) == rows + 1
    code, out, _ = run("heads", photo, *TINY, "--layer", layer, "--stats", "-o", "heads.csv")
    assert (code, out.strip()) == (0, "heads.csv")
    assert len(Path("heads.csv").read_text().splitlines()) == rows + 1


def test_heads_in_numbers_say_what_they_leave_out_and_what_the_weights_are(run: Run, photo: Path) -> None:
    cait = ("--model", "cait_xxs24_224", "--weights", "none", "--img-size", "64", "--resize", "fit")
    code, out, err = run("heads", photo, *cait, "--layer", "all", "--stats", "--json")
    assert code == 0
    assert {row["layer"] for row in json.loads(out)} == {"blocks_token_only.0.attn", "blocks_token_only.1.attn"}
    assert "visattn: left out, as rows do not sum to 1: blocks.0.attn, blocks.1.attn" in err
    assert "random" in err
    code, out, err = run("heads", photo, *cait, "--layer", "0", "--stats")
    assert (code, out) == (2, "")
    assert "no layer of '0' has rows that sum to 1. Choose another, or --layer all." in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stats", "--matrix"), "--matrix and --stats exclude each other. Choose one."),
        (("--stats", "--query", "cls"), "--stats counts all queries of each head. Leave --query and --head out."),
        (("--stats", "--opacity", "0.3"), "--opacity says nothing beside --stats. Leave one of them out."),
        (
            ("--matrix", "--layer", "0", "--head", "0", "--no-marks"),
            "--marks says nothing beside --matrix. Leave one of them out.",
        ),
    ],
)
def test_heads_in_numbers_refuses_what_it_would_not_heed(run: Run, photo: Path, options: tuple[str, ...], message: str) -> None:
    code, _, err = run("heads", photo, *TINY, *options)
    assert code == 2
    assert message in err
    assert not list(Path().glob("*.csv"))


def test_contours_of_several_levels_and_unringed_sinks_stand_in_the_provenance(run: Run, photo: Path) -> None:
    code, out, err = run("overlay", photo, *TINY, "--contours", "0.5", "--contours", "0.8", "--no-marks", "--json")
    assert code == 0, err
    drawing = json.loads(out)[0]["provenance"]["drawing"]
    assert (drawing["contours"], drawing["marks"]) == ([0.5, 0.8], False)


def test_inspect_tells_layers_and_methods(run: Run) -> None:
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
def test_inspect_tells_kinds_and_why_a_method_does_not_apply(run: Run, name: str, shown: list[str]) -> None:
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


def test_doctor_finds_what_is_needed(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    states = {row["check"]: row["state"] for row in json.loads(out)}
    assert code == 0
    assert states["opencv"] == states["torch"] == states["cache"] == "ok"


def test_doctor_asks_the_network_only_where_it_is_told_to(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reached(name: str) -> str:
        asked.append(name)
        return name

    monkeypatch.setattr("visattn.loading.timm_models.reach_hub", reached)
    code, out, _ = run("doctor")
    assert (code, asked) == (0, [])
    assert "model hub" in out
    assert "not asked" in out
    assert "--network" in out
    assert "not asked" not in run("doctor", "--network")[1]
    assert len(asked) == 1
