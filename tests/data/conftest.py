"""Fixtures for tests of data: folders to read, and an empty cache for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.captioned import coco, lines, picture
from tests.data.making import save
from visattn.data.labeled import downloaded as published


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache and hide Debian's package."""
    monkeypatch.setenv("VISATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(published, "PACKAGE", tmp_path / "package")
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a folder with two classes, train and test."""
    for name in (
        "train/dog/b.png",
        "train/dog/a.PNG",
        "train/cat/deep/er/x.bmp",
        "train/cat/y.png",
        "test/cat/1.png",
        "test/dog/2.png",
    ):
        save(tmp_path / "pets" / name)
    return tmp_path / "pets"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    for number in range(4):
        picture(tmp_path / "photos" / f"{number}.png", number)
    return lines(
        tmp_path / "captions.jsonl",
        {"image": "photos/0.png", "captions": ["a dog", "A dog runs."], "split": "train"},
        {"image": "photos/1.png", "caption": "a cat", "split": "test", "license": 3},
        {"image": "photos/2.png", "captions": ["a red star top left,  a blue disk\n center "], "split": "train"},
        {"image": "photos/3.png", "captions": "one alone", "split": "train"},
    )


@pytest.fixture
def coco_root(tmp_path: Path) -> Path:
    root = tmp_path / "coco"
    for number, name in enumerate(("train2017/000000000009.jpg", "train2017/000000000025.jpg", "val2017/000000000139.jpg")):
        picture(root / name, number)
    coco(
        root / "annotations" / "captions_train2017.json",
        {25: "000000000025.jpg", 9: "000000000009.jpg"},
        [(9, "A bowl.\n"), (25, "A giraffe"), (9, "Food in trays")],
    )
    coco(root / "annotations" / "captions_val2017.json", {139: "000000000139.jpg"}, [(139, "A room")])
    (root / "annotations" / "instances_val2017.json").write_text("{}")
    return root
