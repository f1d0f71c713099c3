"""`overlay --save-map` and `--map`: the ending decides the format, and a saved map is drawn as the one that was computed."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_commands import COLORED, TINY, Run, photo, run
from visattn._support.types import MapFormat

__all__ = ["photo", "run"]

ROLLOUT = (*TINY, *COLORED, "--method", "rollout")


@pytest.mark.parametrize("name", ["m.npz", "m.csv", "m.tif", "m.png", "m.TIFF"])
def test_a_saved_map_is_drawn_as_the_computed_one(name: str, run: Run, photo: Path) -> None:
    assert run("overlay", photo, *ROLLOUT, "--save-map", name, "-o", "computed.png")[0] == 0
    code, _, err = run("overlay", photo, *COLORED, "--map", name, "-o", "drawn.png")
    assert code == 0, err
    # a value of 16 bits may fall into the next of 256 colors
    pictures = [np.asarray(Image.open(file), int) for file in ("computed.png", "drawn.png")]
    assert np.abs(pictures[0] - pictures[1]).max() <= (3 if name[2:].lower() in ("tif", "tiff", "png") else 0)


@pytest.mark.parametrize("name", ["m.pdf", "m", "m.jpg", "maps.d/m.nzp"])
def test_another_ending_is_refused_before_a_model_is_loaded(name: str, run: Run, photo: Path, tmp_path: Path) -> None:
    code, out, err = run("overlay", photo, "--model", "no_such_model", "--save-map", name)
    assert (code, out) == (2, "")
    endings = ", ".join(f".{ending}" for ending in get_args(MapFormat))
    assert err == f"visattn: error: {Path(name).name}: maps are saved as {endings}. Choose a name with one of these endings.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["dog.png"]


def test_heads_are_refused_by_a_format_of_one_grid(run: Run, photo: Path, tmp_path: Path) -> None:
    heads = (*TINY, "--method", "attention")
    code, _, err = run("overlay", photo, *heads, "--save-map", "m.tif")
    assert code == 2
    assert ".tif holds one grid, but the map has one for each head. Save it as .npz. Or save one head" in err
    assert len([line for line in err.splitlines() if line.startswith("visattn: error")]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["dog.png"]
    for choice in (("--head", "2"), ("--fusion", "mean")):
        assert run("overlay", photo, *heads, *choice, "--save-map", "m.tif", "-o", "out.png", "--overwrite")[0] == 0


def test_values_alone_are_not_drawn_over_another_size(run: Run, photo: Path) -> None:
    assert run("overlay", photo, *ROLLOUT, "--save-map", "m.npy", "-o", "computed.png")[0] == 0
    code, _, err = run("overlay", photo, "--map", "m.npy", "-o", "drawn.png")
    assert code != 0
    assert "a heatmap must be (height, width) = (60, 90) like the photo, got (3, 5)" in err
