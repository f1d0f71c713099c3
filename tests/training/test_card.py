"""Model cards state the given facts and nothing else."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from visattn.data.scenes.causes import CAUSES, CausedScenes, class_meaning
from visattn.data.scenes.painting import COLORS
from visattn.training.config import Config
from visattn.training.report import source
from visattn.training.report.card import Achieved, Data, Origin, card, wilson
from visattn.training.report.costs import Cost

CONFIG = Config(data="scenes", model="visattn_resnet20", attention="cbam", seed=3, lr=0.05)
DATA = Data("scenes", ("disc", "ring"), 6000, 1000, {"train": "ab12", "test": "cd34"}, "CC0")
REACHED = Achieved(0.9312, 0.2345, 10, 4690, 1234, 812.3, "2 cores of an AMD EPYC")
COST = Cost(272_995, 40_823_000)
GIVEN: dict[str, Any] = {
    "cost": COST,
    "shape": (3, 64, 48),
    "limits": ("Small shapes are missed.",),
}
ORIGIN = Origin("visattn train --data scenes", {"visattn": "0.1.0", "torch": "2.15.0"}, "ef56", "Apache-2.0")


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_fact_is_in_its_section() -> None:
    page = card(CONFIG, DATA, REACHED, ORIGIN, **GIVEN)
    parts = sections(page)
    assert page.startswith("# `visattn_resnet20` with `cbam` on `scenes`\n\n## Model details\n")
    expected = {
        "Model details": [
            "color images of 48 x 64 pixels, 2 classes: `disc`, `ring`.",
            "272,995",
            "40.8 M",
            "ef56",
            "random",
        ],
        "Training data": [
            "6,000 training images, 1,000 test images",
            "Fingerprint (train): `ab12`",
            "cd34",
            "images: CC0.",
        ],
        "Training procedure": ["```console\nvisattn train --data scenes\n```", "lr = 0.05"],
        "Evaluation results": [
            "93.12 %",
            "0.2345 nats",
            "10 epochs, 4,690 steps, 20.6 minutes, 812 images/s",
            "Machine: 2 cores of an AMD EPYC.",
            "visattn 0.1.0, torch 2.15.0",
        ],
        "Limits": ["with seed 3", "Small shapes are missed."],
        "License": ["Apache-2.0"],
    }
    assert list(parts) == list(expected)
    missing = [(head, fact) for head, facts in expected.items() for fact in facts if fact not in parts[head]]
    assert missing == []


def test_card_contains_the_full_configuration() -> None:
    made = sections(card(CONFIG, DATA, REACHED, ORIGIN, **GIVEN))["Training procedure"]
    found = re.search(r"```toml\n(.*?)```", made, re.DOTALL)
    assert found
    assert tomllib.loads(found[1]) == CONFIG.digest()


def test_the_same_facts_give_the_same_page() -> None:
    assert card(CONFIG, DATA, REACHED, ORIGIN, **GIVEN) == card(CONFIG, DATA, REACHED, ORIGIN, **GIVEN)


def test_unknown_facts_are_shown_as_not_stated() -> None:
    bare = Origin(ORIGIN.command, ORIGIN.versions)
    data = dataclasses.replace(DATA, license="", fingerprints={})
    page = card(dataclasses.replace(CONFIG, attention="none", weights="auto"), data, REACHED, bare, cost=COST, shape=(3, 64, 48))
    assert page.startswith("# `visattn_resnet20` on `scenes`\n")
    parts = sections(page)
    assert parts["License"].strip() == "Not stated."
    assert "images: not stated." in parts["Training data"]
    assert "Fingerprint" not in page
    assert "sha256" not in page
    assert "Initial weights: `auto`." in parts["Model details"]
    assert "plain." in parts["Model details"]
    assert parts["Limits"].count("\n- ") == 3


def test_gray_images_are_described_as_gray() -> None:
    assert ": gray images of 28 x 28" in card(CONFIG, DATA, REACHED, ORIGIN, **GIVEN | {"shape": (1, 28, 28)})


def test_long_class_list_is_shortened_with_a_count() -> None:
    data = dataclasses.replace(DATA, classes=[f"c{i}" for i in range(1000)])
    page = card(CONFIG, data, REACHED, ORIGIN, **GIVEN)
    assert " 1000 classes: `c0`, " in page
    assert "`c99` and 900 more." in page


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a|b", "`a|b`"),
        ("tick`s", "``tick`s``"),
        ("``", "``` `` ```"),
        ("two\nlines", r"`two\nlines`"),
        ("<b>", "`<b>`"),
        ("left\u202eright", r"`left\u202eright`"),
    ],
)
def test_class_names_are_escaped_in_the_card(name: str, shown: str) -> None:
    page = card(CONFIG, dataclasses.replace(DATA, classes=("disc", name)), REACHED, ORIGIN, **GIVEN)
    assert f" 2 classes: `disc`, {shown}.\n" in page


def test_command_cannot_close_its_code_block() -> None:
    page = card(CONFIG, DATA, REACHED, dataclasses.replace(ORIGIN, command="x\n```\n# y"), **GIVEN)
    assert "````console\nx\n```\n# y\n````\n" in page


@pytest.mark.parametrize(("hits", "count"), [(0, 5), (5, 5), (931, 1000), (1, 3), (7000, 10000)])
def test_accuracy_intervals_are_wilson_intervals(hits: int, count: int) -> None:
    expected = binomtest(hits, count).proportion_ci(0.95, "wilson")
    assert wilson(hits / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_commit_and_meaning_of_classes_are_told_if_they_are_known() -> None:
    plain = card(CONFIG, DATA, REACHED, ORIGIN, **GIVEN)
    assert "- Commit of visattn: not known.\n" in plain
    known = card(
        CONFIG,
        dataclasses.replace(DATA, meaning="Each class is a shape."),
        REACHED,
        dataclasses.replace(ORIGIN, commit="ab12"),
        **GIVEN,
    )
    assert "- Commit of visattn: `ab12`.\n" in known
    assert "- Each class is a shape.\n" in sections(known)["Model details"]


def test_the_commit_is_that_of_the_repository_that_tracks_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", "-C", tmp_path, *own, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    package = tmp_path / "library" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(source, "_PACKAGE", package)
    monkeypatch.setattr(source, "_installed_from", lambda: "elsewhere")
    assert source.commit() == "elsewhere", "no repository"
    git("init", "-q")
    (tmp_path / "own.txt").write_text("")
    git("add", "own.txt")
    git("commit", "-q", "-m", "own")
    assert source.commit() == "elsewhere", "the repository of somebody else's project, in which the package is installed"
    git("add", ".")
    git("commit", "-q", "-m", "all")
    assert source.commit() == git("rev-parse", "HEAD")
    (tmp_path / "own.txt").write_text("changed")
    assert source.commit() == git("rev-parse", "HEAD"), "a change elsewhere"
    (package / "__init__.py").write_text("changed = True")
    assert source.commit() == git("rev-parse", "HEAD") + ", changed since"


def test_the_meaning_of_causes_is_what_the_scenes_show() -> None:
    for cause in CAUSES:
        values = dict(pair.split(" = ") for pair in class_meaning(cause).rpartition(": ")[2].rstrip(".").split(", "))
        assert list(values) == ["0", "1", "2", "3"]
        for index in range(24):
            scene = CausedScenes(cause, 24, seed=3).scene(index)
            said, first = values[str(scene.label)], scene.things[0]
            if cause == "color":
                assert said == first.color
            elif cause == "border":
                assert scene.image[0, 0].tolist() == list(COLORS[said])
            elif cause == "companion":
                assert said == first.shape
            elif cause == "position":
                row, column = (at > 0.5 for at in first.center)
                assert said == f"{('top', 'bottom')[row]} {('left', 'right')[column]}"
