"""Mean maps of a run over many images, against loops over the maps that it saves for each image."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import visattn
from tests.cli.test_commands import Run, run
from visattn.batch import items_of
from visattn.batch.means import _short, collected
from visattn.core.drawing import colormaps
from visattn.core.provenance import Provenance
from visattn.errors import OutputError

__all__ = ["run"]

COUNT = 5
MODEL = ("--model", "scenes_cnn", "--batch-size", "2", "-q")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write scenes of several sizes into two folders, and a file that is no image."""
    for number in range(COUNT):
        folder = tmp_path / "photos" / ("cats", "dogs")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        scene = visattn.load_image(f"scene:{number}")
        scene.resize((64 + 20 * (number % 3), 64)).save(folder / f"{number}.png")
    (tmp_path / "photos" / "cats" / "9.png").write_bytes(b"nothing")
    return tmp_path / "photos"


def group_of(made: Provenance, file: Path, by: str) -> str:
    if by == "class":
        return f"{made.scores[0]['predicted']} {made.scores[0]['name']}"
    return "all" if by == "all" else f"photos/{file.parent.name}"


def slow_means(folder: Path, by: str) -> dict[str, tuple[NDArray[np.float64], int]]:
    """Average the maps that were saved for each image, each divided by its own mean."""
    sums: dict[str, Any] = {}
    for file in sorted(folder.rglob("*.npz")):
        loaded = visattn.load_map(file)
        assert isinstance(loaded, tuple)
        one, made = loaded[0].values.double().numpy(), loaded[0].provenance
        group = group_of(made, file, by)
        values = [float(value) for row in one for value in row]
        mean = sum(abs(value) for value in values) / len(values)
        known, count = sums.get(group, (np.zeros(one.shape), 0))
        sums[group] = known + one / mean, count + 1
    return {group: (known / count, count) for group, (known, count) in sums.items()}


def means_of(folder: Path) -> dict[str, tuple[NDArray[np.float32], int]]:
    found = visattn.load_maps(next(folder.glob("means.*.tar")))
    return {name: (one.numpy(), one.provenance.parameters["mean of maps"]) for name, one, _ in found}


def check(folder: Path, by: str) -> None:
    found, expected = means_of(folder), slow_means(folder, by)
    assert found.keys() == expected.keys()
    for group, (mean, count) in expected.items():
        np.testing.assert_allclose(found[group][0], mean, rtol=1e-5)
        assert found[group][1] == count


@pytest.mark.parametrize("by", ["class", pytest.param("folder", marks=pytest.mark.full)])
def test_means_are_those_of_a_loop_over_the_saved_maps(by: str, photos: Path, run: Run) -> None:
    code, _, err = run("batch", "photos", *MODEL, "--maps", "--no-pictures", "--mean-by", by, "-o", "out")
    assert code == 1, err  # of the file that is no image
    check(Path("out"), by)


FILES = "means.overlay.tar", "means.overlay.png"
BY_FOLDER = ("batch", "photos", *MODEL, "--no-pictures", "--mean-by", "folder")


@pytest.fixture
def whole(photos: Path, run: Run) -> dict[str, bytes]:
    """Return the files of the means of a run that was not disturbed."""
    run(*BY_FOLDER, "-o", "whole")
    return {name: Path("whole", name).read_bytes() for name in FILES}


def test_parts_give_the_means_of_one_run(whole: dict[str, bytes], run: Run) -> None:
    for part in ("0/2", "1/2"):
        run(*BY_FOLDER, "--shard", part, "-o", "parts")
    assert {name: Path("parts", name).read_bytes() for name in FILES} == whole


@pytest.mark.full
def test_a_run_that_goes_on_gives_the_means_of_one_that_was_not_disturbed(whole: dict[str, bytes], run: Run) -> None:
    for name in (*FILES, "sums/00000002.json"):
        Path("whole", name).unlink()
    lines = Path("whole/journal.jsonl").read_text().splitlines()
    Path("whole/journal.jsonl").write_text("\n".join(lines[:6]) + "\n")  # as after a kill
    run(*BY_FOLDER, "-o", "whole")
    assert {name: Path("whole", name).read_bytes() for name in FILES} == whole


@pytest.mark.full
def test_images_that_are_gone_are_in_no_mean(photos: Path, run: Run) -> None:
    given = ("batch", "photos", *MODEL, "--maps", "--no-pictures", "--mean-by", "all", "-o", "out")
    run(*given)
    for gone in (photos / "dogs" / "1.png", photos / "dogs" / "3.png"):
        gone.unlink()
    run(*given)
    for number in ("1", "3"):
        next(Path("out").rglob(f"{number}.*npz")).unlink()
    check(Path("out"), "all")


def test_figure_has_one_scale_for_all_groups(photos: Path, run: Run) -> None:
    run("batch", "photos", *MODEL, "--no-pictures", "--mean-by", "folder", "-o", "out")
    means = {name: mean for name, (mean, _) in means_of(Path("out")).items()}
    low, high = min(float(mean.min()) for mean in means.values()), max(float(mean.max()) for mean in means.values())
    with Image.open("out/means.overlay.png") as picture:
        made, pixels = json.loads(picture.info["visattn"]), np.asarray(picture.convert("RGB"))
    assert made["value_range"] == pytest.approx([low, high])
    assert made["drawing"]["labels"] == ["photos/cats: 3 images", "photos/dogs: 2 images"]
    assert made["drawing"]["scale"] == "relative"
    table = colormaps.table("inferno")
    top = next(y for y in range(len(pixels)) if (pixels[y, 18:] != 255).any(-1).sum() > 380)  # first row of the panels
    for number, mean in enumerate(means.values()):
        for row in range(8):
            for column in range(8):
                level = round((float(mean[row, column]) - low) / (high - low) * 255)
                there = pixels[top + 25 * row + 12, 18 + 208 * number + 25 * column + 12]
                assert (
                    min(
                        int(np.abs(table[near].astype(int) - there).max())
                        for near in range(max(level - 1, 0), min(level + 2, 256))
                    )
                    == 0
                )


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (("--model", "scenes_vit", "--method", "rollout", "--mean-by", "class"), "rollout"),
        (("--model", "scenes_vit", "--method", "pca", "--mean-by", "all"), "principal component"),
        (("--model", "scenes_vit", "--method", "similarity", "--query", "patch:0,0", "--mean-by", "all"), "zero has no meaning"),
        (
            (
                "--model",
                "vit_tiny_patch16_224",
                "--weights",
                "none",
                "--img-size",
                "64",
                "--resize",
                "fit",
                "--method",
                "rollout",
                "--mean-by",
                "all",
            ),
            "--resize model",
        ),
    ],
    ids=["no class", "components", "similarity", "other inputs"],
)
def test_runs_without_a_mean_end_at_once_and_say_why(given: tuple[str, ...], cause: str, photos: Path, run: Run) -> None:
    (photos / "cats" / "9.png").unlink()
    code, _, err = run("batch", "photos", *given, "-q", "-o", "out")
    assert code in (2, 4), err
    assert err.count("\n") == 1
    assert cause in err
    assert not list(Path("out").glob("means*"))


def test_parts_with_other_inputs_have_no_mean(tmp_path: Path, run: Run) -> None:
    for number, size in enumerate([(64, 64), (64, 128)]):
        (tmp_path / "two" / str(number)).mkdir(parents=True)
        visattn.load_image("scene:0").resize(size).save(tmp_path / "two" / str(number) / "one.png")
    model = ("--model", "vit_tiny_patch16_224", "--weights", "none", "--img-size", "64", "--resize", "fit", "--method", "rollout")
    given = ("batch", "two", *model, "--no-pictures", "--mean-by", "folder", "--batch-size", "1", "-q", "-o", "out")
    assert run(*given, "--shard", "0/2")[0] == 0
    code, _, err = run(*given, "--shard", "1/2")
    assert code == 4
    assert "cells" in err
    assert "--resize model" in err


def test_damaged_sums_are_named(photos: Path, run: Run) -> None:
    given = ("batch", "photos", *MODEL, "--no-pictures", "--mean-by", "all", "-o", "out")
    run(*given)

    sources = [item.source for item in items_of(["photos"])]
    file = Path("out/sums/00000000.json")
    stored = json.loads(file.read_text())
    edits: list[dict[str, Any]] = [{"total": [[1.0]]}, {"counts": [[1]]}, {"maps": -1}, {"like": {}}]
    for edit in edits:
        file.write_text(json.dumps([stored[0] | edit]))
        with pytest.raises(OutputError, match=r"00000000\.json: is damaged"):
            collected(Path("out"), sources)


def test_folders_are_named_from_the_one_that_holds_all() -> None:
    assert _short(["/x/photos/cats", "/x/photos/dogs"]) == ["photos/cats", "photos/dogs"]
    assert _short(["/x/photos", "/x/photos/photos"]) == ["photos", "photos/photos"]
    assert _short(["photos"]) == ["photos"]
    assert _short(["s3://b/one", "s3://b/two"]) == ["b/one", "b/two"]
    assert _short(["/one", "two"]) == ["one", "two"]
    assert _short([os.curdir]) == ["."]
