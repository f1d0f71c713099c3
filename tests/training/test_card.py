"""A model card holds the facts that it was given, and nothing that was not."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from typing import Any

import pytest
from scipy.stats import binomtest

from visattn.training.config import Config
from visattn.training.report.card import Data, Origin, Reached, card, wilson
from visattn.training.report.costs import Cost

CONFIG = Config(data="scenes", model="visattn_resnet20", attention="cbam", seed=3, lr=0.05)
DATA = Data("scenes", ("disc", "ring"), 6000, 1000, {"train": "ab12", "test": "cd34"}, "CC0")
REACHED = Reached(0.9312, 0.2345, 10, 4690, 1234, 812.3, "2 cores of an AMD EPYC")
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


def test_every_fact_stands_in_its_section() -> None:
    page = card(CONFIG, DATA, REACHED, ORIGIN, **GIVEN)
    parts = sections(page)
    assert page.startswith("# `visattn_resnet20` with `cbam` on `scenes`\n\n## What it is\n")
    expected = {
        "What it is": [
            "color pictures of 64 x 48 pixels to one of 2 classes, `disc`, `ring`.",
            "272,995",
            "40.8 M",
            "ef56",
            "random",
        ],
        "What it was trained on": [
            "6,000 pictures to train on, 1,000 to test on",
            "Fingerprint (train): `ab12`",
            "cd34",
            "pictures: CC0.",
        ],
        "How it was made": ["```console\nvisattn train --data scenes\n```", "lr = 0.05"],
        "What it reaches": [
            "93.12 %",
            "0.2345 nats",
            "10 epochs, 4,690 steps, 20.6 minutes, 812 images/s",
            "Machine: 2 cores of an AMD EPYC.",
            "visattn 0.1.0, torch 2.15.0",
        ],
        "Limits": ["of seed 3", "Small shapes are missed."],
        "License": ["Apache-2.0"],
    }
    assert list(parts) == list(expected)
    missing = [(head, fact) for head, facts in expected.items() for fact in facts if fact not in parts[head]]
    assert missing == []


def test_the_recipe_is_the_whole_configuration() -> None:
    made = sections(card(CONFIG, DATA, REACHED, ORIGIN, **GIVEN))["How it was made"]
    found = re.search(r"```toml\n(.*?)```", made, re.DOTALL)
    assert found
    assert tomllib.loads(found[1]) == CONFIG.digest()


def test_the_same_facts_give_the_same_page() -> None:
    assert card(CONFIG, DATA, REACHED, ORIGIN, **GIVEN) == card(CONFIG, DATA, REACHED, ORIGIN, **GIVEN)


def test_what_is_not_known_is_said_to_be_not_stated() -> None:
    bare = Origin(ORIGIN.command, ORIGIN.versions)
    data = dataclasses.replace(DATA, license="", fingerprints={})
    page = card(dataclasses.replace(CONFIG, attention="none", weights="auto"), data, REACHED, bare, cost=COST, shape=(3, 64, 48))
    assert page.startswith("# `visattn_resnet20` on `scenes`\n")
    parts = sections(page)
    assert parts["License"].strip() == "Not stated."
    assert "pictures: not stated." in parts["What it was trained on"]
    assert "Fingerprint" not in page
    assert "sha256" not in page
    assert "start: `auto`." in parts["What it is"]
    assert "plain." in parts["What it is"]
    assert parts["Limits"].count("\n- ") == 3


def test_gray_pictures_are_called_so() -> None:
    assert "from gray pictures of 28 x 28" in card(CONFIG, DATA, REACHED, ORIGIN, **GIVEN | {"shape": (1, 28, 28)})


def test_many_classes_are_counted() -> None:
    data = dataclasses.replace(DATA, classes=[f"c{i}" for i in range(1000)])
    page = card(CONFIG, data, REACHED, ORIGIN, **GIVEN)
    assert "one of 1000 classes, `c0`, " in page
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
def test_names_from_outside_stay_names(name: str, shown: str) -> None:
    page = card(CONFIG, dataclasses.replace(DATA, classes=("disc", name)), REACHED, ORIGIN, **GIVEN)
    assert f"one of 2 classes, `disc`, {shown}.\n" in page


def test_a_command_that_closes_its_block_does_not() -> None:
    page = card(CONFIG, DATA, REACHED, dataclasses.replace(ORIGIN, command="x\n```\n# y"), **GIVEN)
    assert "````console\nx\n```\n# y\n````\n" in page


@pytest.mark.parametrize(("hits", "count"), [(0, 5), (5, 5), (931, 1000), (1, 3), (7000, 10000)])
def test_intervals_of_shares_are_wilsons(hits: int, count: int) -> None:
    expected = binomtest(hits, count).proportion_ci(0.95, "wilson")
    assert wilson(hits / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)
