"""Model cards state the given facts and nothing else."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from typing import Any

import pytest
from scipy.stats import binomtest

from visattn.training.config import Config
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
            "color images of 64 x 48 pixels, 2 classes: `disc`, `ring`.",
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
