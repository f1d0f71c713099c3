"""Files made for sharing contain base names instead of full paths."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.captioning.real import coco
from tests.cli.test_commands import TINY, Run, run
from tests.training.small import pictures, recipe
from visattn.training import CaptionConfig, Config, compare_runs, train
from visattn.training.report.run_files import command

__all__ = ["run"]

OWN = """
from torch import nn

def small(num_classes, in_channels, note=""):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
"""
HOME = "home-of-jane"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / HOME).mkdir()
    (tmp_path / HOME / "own.py").write_text(OWN)
    return tmp_path / HOME


def telling(folder: Path) -> list[str]:
    """List the files of a folder that reveal the path of the home folder."""
    found = [path.name for path in folder.rglob("*") if path.is_file() and HOME.encode() in path.read_bytes()]
    for path in folder.rglob("*.png"):
        with Image.open(path) as picture:
            found += [path.name] * (HOME in str(picture.info))
    return sorted(found)


def test_classifier_outputs_do_not_contain_data_paths(home: Path) -> None:
    data = pictures(home / "photos")
    note = {"note": str(home / "notes.txt")}
    config = recipe(data, model=f"{home}/own.py:small", widths=(), model_kwargs=note, epochs=0.4, maps_every=1)
    train(config, home / "run")
    for name in ("README.md", "curves.png", "log.jsonl"):
        assert HOME.encode() not in (home / "run" / name).read_bytes()
    assert not telling(home / "run" / "maps")
    card = (home / "run" / "README.md").read_text()
    assert card.startswith("# `own.py:small` on `photos`\n")
    assert "--data photos --img-size 16 --model own.py:small" in card
    assert 'data = "photos"' in card
    told = json.loads((home / "run" / "final" / "model.json").read_text())
    assert (told["data"], told["model"]) == ("photos", "own.py:small")
    assert HOME not in str(told | {"options": None})


def test_comparison_pages_do_not_contain_data_paths(home: Path) -> None:
    data = pictures(home / "photos")
    compare_runs(recipe(data, epochs=0.4), home / "run", ["se"], 1)
    assert [path.name for path in (home / "run").iterdir() if path.is_file() and HOME.encode() in path.read_bytes()] == [
        "recipe.json"
    ]
    with Image.open(home / "run" / "comparison.png") as picture:
        assert HOME not in str(picture.info)


def test_captioner_card_names_its_root_without_the_path(home: Path) -> None:
    options: dict[str, Any] = {
        "batch_size": 20,
        "epochs": 0.1,
        "embed_dim": 8,
        "hidden_dim": 8,
        "dropout": 0.0,
        "img_size": 32,
        "device": "cpu",
    }
    photos = coco(home / "coco")
    train(CaptionConfig(data=str(photos), root=str(photos), model="visattn_resnet14", **options), home / "run")
    assert HOME.encode() not in (home / "run" / "README.md").read_bytes()
    assert not telling(home / "run" / "final")
    assert "--data coco --root coco " in (home / "run" / "README.md").read_text()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"data": f"/{HOME}/photos/"}, "--data photos "),
        ({"data": f"/{HOME}/scenes"}, "--data ./scenes "),
        ({"data": "./scenes"}, "--data ./scenes "),
        ({"data": "scenes"}, "--data scenes "),
        ({"data": "cifar10", "root": f"/{HOME}/files"}, "--data cifar10 --root files "),
        ({"weights": f"/{HOME}/best.pth"}, "--weights best.pth "),
        ({"weights": "auto"}, "--weights auto "),
    ],
)
def test_card_commands_name_files_without_their_paths(given: dict[str, Any], shown: str) -> None:
    line = command(Config(**given))
    assert shown in line
    assert HOME not in line


SETTINGS = {
    "classify": Config(
        data="scenes",
        model="visattn_vit_c",
        model_kwargs={"embed_dim": 48},
        attention="cbam",
        epochs=2.5,
        freeze=("blocks", "norm"),
        jitter=0.2,
        augment="imagenet",
        crop_scale=(0.5, 0.9),
        device="cpu",
        maps_every=20,
        license="CC BY 4.0",
    ),
    "caption": CaptionConfig(
        data="scenes", coordinates=True, first="learned", regularizer=0.0, device="cpu", license="Apache-2.0"
    ),
    "defaults": Config(),
}


@pytest.mark.parametrize("config", SETTINGS.values(), ids=SETTINGS)
def test_the_command_of_a_card_gives_all_settings_of_the_run(config: Config | CaptionConfig, run: Run) -> None:
    code, out, err = run(*shlex.split(command(config))[1:], "--dry-run")
    assert code == 0, err
    assert tomllib.loads(out) == tomllib.loads(config.toml())
    assert f"--attention {config.attention}" in command(config)


def test_statistics_do_not_contain_photo_paths(run: Run, home: Path) -> None:
    data = pictures(home / "photos", train=2, test=2)
    code, _, err = run("stats", data / "test", *TINY, "-o", home / "stats")
    assert code == 0, err
    assert not telling(home / "stats")
    assert json.loads((home / "stats" / "stats.json").read_text())["provenance"]["image"] == "test"
