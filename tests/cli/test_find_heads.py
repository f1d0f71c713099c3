"""`visattn heads --find`: heads ranked by a property of patches."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_commands import TINY, Run, run
from visattn.evaluation import find_heads

__all__ = ["run"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write a folder with two photos, and one with their masks."""
    random = np.random.default_rng(0)
    for folder in ("photos", "masks"):
        (tmp_path / folder).mkdir()
    for name in ("a", "b"):
        Image.fromarray(random.integers(0, 256, (60, 90, 3), dtype=np.uint8)).save(tmp_path / "photos" / f"{name}.jpg")
        Image.fromarray(255 * (random.random((60, 90)) > 0.6).astype(np.uint8)).save(tmp_path / "masks" / f"{name}.png")
    return tmp_path / "photos"


def test_heads_are_ranked_as_in_python(run: Run, photos: Path) -> None:
    code, out, err = run("heads", photos, *TINY, "--find", "object", "--masks", photos.parent / "masks", "--json")
    assert code == 0, err
    masks = [np.asarray(Image.open(photos.parent / "masks" / f"{name}.png")) for name in ("a", "b")]
    files = [str(photos / f"{name}.jpg") for name in ("a", "b")]
    expected = find_heads(TINY[1], files, "object", masks=masks, weights="none", img_size=64, resize="fit")
    assert json.loads(out) == [pytest.approx(row) for row in expected.rows()]
    assert "2 images: heads by a property of patches (property object, draws 99, seed 0)" in err
    assert "each on its own" in err


def test_one_photo_and_a_table(run: Run, photos: Path) -> None:
    code, out, err = run("heads", photos / "a.jpg", *TINY, "--find", "neighbor", "-o", "found.csv")
    assert code == 0, err
    assert "one photo says little" in err
    assert out.strip() == "found.csv"
    rows = list(csv.DictReader((photos.parent / "found.csv").read_text().splitlines()))
    assert list(rows[0]) == ["layer", "head", "score", "null", "p", "low", "high"]
    beyond = [float(row["score"]) - float(row["null"]) for row in rows]
    assert beyond == sorted(beyond, reverse=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--find", "object"], "need a mask for each image"),
        (["--find", "hue", "--masks", "masks"], "--masks has no effect with --find hue"),
        (["--find", "hue", "--layer", "2"], "--layer has no effect with --find"),
        (["--find", "hue", "--colormap", "viridis"], "--colormap has no effect with --find"),
        (["--masks", "masks"], "--masks has no effect"),
        (["--find", "object", "--masks", "masks/a.png"], "is one mask for 2 photos"),
        (["--find", "object", "--masks", "photos/.."], "must hold one mask named a.png, got none"),
    ],
)
def test_bad_options_are_refused(given: list[str], message: str, run: Run, photos: Path) -> None:
    code, _, err = run("heads", photos, *TINY, *given)
    assert code != 0
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_property_that_a_photo_lacks_is_null_in_json(run: Run, photos: Path) -> None:
    Image.new("RGB", (60, 60), "gray").save(photos / "gray.png")
    code, out, err = run("heads", photos / "gray.png", *TINY, "--find", "hue", "--json")
    assert code == 0, err
    assert {row["score"] for row in json.loads(out)} == {None}


def test_tables_replace_no_input(run: Run, photos: Path) -> None:
    mask = photos.parent / "masks" / "a.png"
    for target, given in ((mask, ("--find", "object", "--masks", mask)), (photos / "b.jpg", ("--find", "row"))):
        image = photos if target.suffix == ".jpg" else photos / "a.jpg"
        before = target.read_bytes()
        code, _, err = run("heads", image, *TINY, *given, "-o", target, "--overwrite")
        assert code == 2
        assert "the output is the input itself" in err
        assert target.read_bytes() == before
