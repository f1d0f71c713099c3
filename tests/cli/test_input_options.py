"""Other inputs of a model on the command line: files of numbers, photos, and which input the photo is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_commands import Run, run

__all__ = ["run"]

MODELS = '''
import torch
from torch import nn

CELL = 8


class OfCell(nn.Module):
    """The score is read from one cell of one of two pictures, times a row of a table."""

    def __init__(self, picture, row, column):
        super().__init__()
        self.of_rgb, self.of_depth = nn.Conv2d(3, 2, CELL, CELL), nn.Conv2d(1, 2, CELL, CELL)
        for stem in (self.of_rgb, self.of_depth):
            nn.init.constant_(stem.weight, 1e-4)
            nn.init.constant_(stem.bias, 1.0)
        self.picture, self.row, self.column = picture, row, column

    def forward(self, rgb, depth, table):
        features = {"rgb": self.of_rgb(rgb), "depth": self.of_depth(depth)}[self.picture]
        value = features[:, :, self.row, self.column].mean(1, keepdim=True) * table.sum(1, keepdim=True)
        return torch.cat([value, 0 * value], 1)


class OfBatch(OfCell):
    def forward(self, batch):
        return super().forward(batch["rgb"], batch["views"][1], batch["table"])


def cell():
    return OfCell("rgb", 1, 2)


def nested():
    return OfBatch("rgb", 1, 2)
'''
SIDE = 32
GIVEN = (
    "--method",
    "hirescam",
    "--target",
    "0",
    "--img-size",
    "32",
    "--resize",
    "fit",
    "--interpolation",
    "nearest",
    "-o",
    "out.png",
)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(MODELS)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    Image.fromarray(np.stack([columns, rows, 0 * rows], -1).astype(np.uint8)).save(tmp_path / "photo.png")
    np.save(tmp_path / "depth.npy", np.random.default_rng(0).random((1, 1, SIDE, SIDE)))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "depth.npy").read_bytes()[:500])
    (tmp_path / "row.csv").write_text("1,2.5,-3\n")
    (tmp_path / "row.json").write_text("[[1, 2.5, -3]]")
    (tmp_path / "words.csv").write_text("width,height\n1,2\n")
    (tmp_path / "ragged.json").write_text("[[1], [1, 2]]")
    (tmp_path / "names.json").write_text('{"a": 1}')
    return tmp_path


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("cell", ["--input", "depth=depth.npy", "--input", "table=row.csv"]),
        ("cell", ["--image-input", "rgb", "--input", "table=row.json", "--input", "depth=depth.npy"]),
        ("cell", ["--image-input", "0", "--input", "2=row.csv", "--input", "1=depth.npy"]),
        (
            "nested",
            [
                *("--image-input", "batch.rgb", "--input", "batch.views.1=depth.npy", "--input", "batch.views.0=row.csv"),
                *("--input", "batch.table=row.csv"),
            ],
        ),
    ],
)
def test_the_cell_that_decides_is_drawn(run: Run, files: Path, model: str, options: list[str]) -> None:
    code, out, err = run("overlay", "photo.png", "--model", f"net.py:{model}", *options, *GIVEN, "--ground", "photo", "--json")
    assert code == 0, err
    with Image.open(files / "out.png") as drawn, Image.open(files / "photo.png") as photo:
        different = (np.asarray(drawn.convert("RGB")).astype(int) != np.asarray(photo).astype(int)).any(-1)
    expected = np.zeros((SIDE, SIDE), bool)
    expected[8:16, 16:24] = True
    assert (different == expected).all()
    (score,) = json.loads(out)[0]["provenance"]["scores"]
    assert score["score"] == pytest.approx(0.5, abs=0.05)  # 1 - 3 + 2.5, times a value close to 1
    assert "the picture is the input" in err


def test_a_photo_is_preprocessed_as_the_picture_is_and_that_is_said(run: Run, files: Path) -> None:
    (files / "net.py").write_text(MODELS.replace("nn.Conv2d(1, 2", "nn.Conv2d(3, 2"))
    options = ("--image-input", "rgb", "--input", "depth=photo:coffee", "--input", "table=row.csv")
    code, _, err = run("overlay", "photo.png", "--model", "net.py:cell", *options, *GIVEN)
    assert code == 0, err
    assert "input depth: coffee.png, preprocessed as the picture is" in err
    assert "the picture is the input rgb; other images: depth (1, 3, 32, 32)" in err


REST = ("--input", "table=row.csv")
WRONG = {
    "no file": (("--input", "depth=none.npy"), "none.npy: cannot be read (no such file"),
    "no name": (("--input", "depth.npy"), "must be NAME=FILE, the name of an input and its file, got depth.npy"),
    "objects": (
        ("--input", "depth=objects.npy"),
        "objects.npy: holds no array of numbers (Array can't be memory-mapped: Python objects",
    ),
    "cut": (("--input", "depth=cut.npy"), "cut.npy: holds no array of numbers"),
    "words": (("--input", "table=words.csv"), "words.csv: holds no array of numbers (could not convert string 'width'"),
    "ragged": (("--input", "table=ragged.json"), "ragged.json: holds no array of numbers"),
    "names": (("--input", "table=names.json"), "names.json: holds no array of numbers"),
    "another file": (("--input", "table=net.py"), "net.py: not an image"),
    "unknown name": (
        ("--input", "dpeth=depth.npy", *REST),
        "no input 'dpeth'; did you mean 'depth'? Its inputs: rgb, depth, table",
    ),
    "unknown picture": (("--input", "depth=depth.npy", *REST, "--image-input", "rbg"), "no input 'rbg'; did you mean 'rgb'"),
    "missing": (REST, "one of the inputs rgb, depth is the photo, and the others are missing"),
    "twice": (("--input", "depth=depth.npy", "--input", "depth=row.csv"), "the input depth is given twice"),
    "picture twice": (("--input", "depth=depth.npy", *REST, "--image-input", "depth"), "the input depth is given twice"),
    "wrong shape": (("--input", "depth=row.csv", *REST), "depth (1, 3), table (1, 3)"),
    "gap": (("--image-input", "rgb", "--input", "depth.1=depth.npy", *REST), "the input depth.0 is missing"),
    "inside of another": (("--image-input", "depth.rgb", "--input", "depth=depth.npy"), "depth.rgb lies inside of another"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_wrong_is_told_in_a_line(run: Run, files: Path, name: str) -> None:
    options, message = WRONG[name]
    code, out, err = run("overlay", "photo.png", "--model", "net.py:cell", *options, *GIVEN, "-q")
    errors = [line for line in err.splitlines() if "warning" not in line]
    assert code > 1
    assert not out
    assert len(errors) == 1
    assert message in errors[0]
    assert not (files / "out.png").exists()


def test_no_output_replaces_an_input(run: Run, files: Path) -> None:
    options = ("--input", "depth=out.png", *REST)
    (files / "out.png").write_bytes((files / "photo.png").read_bytes())
    code, _, err = run("overlay", "photo.png", "--model", "net.py:cell", *options, *GIVEN, "--overwrite")
    assert code > 1
    assert "out.png" in err
    assert (files / "out.png").read_bytes() == (files / "photo.png").read_bytes()


@pytest.mark.parametrize("option", [("--input", "a=row.csv"), ("--image-input", "a")])
def test_a_saved_map_takes_no_inputs(run: Run, files: Path, option: tuple[str, str]) -> None:
    code, _, err = run("overlay", "photo.png", "--map", "map.npz", *option)
    assert code > 1
    assert f"{option[0]} has no effect with --map" in err
