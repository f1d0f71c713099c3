"""Command `visattn evaluate`: tables beside a computation in Python, maps and masks in folders, and runs that go on."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import visattn
from tests.cli.test_commands import Run, run
from visattn.evaluation import evaluate

__all__ = ["run"]

MODEL = ("--model", "scenes_vit")
FEW = ("--nulls", "1", "--steps", "2", "--metrics", "deletion")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, scene in (("a.png", "scene:7"), ("b.png", "scene:3")):
        visattn.load_image(scene).resize((64, 64)).save(folder / name)
    return folder


def values(path: Path, maps: list[str] | None = None) -> list[tuple[str, str, float]]:
    with path.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if maps is None or row["map"] in maps]
    return [(row["metric"], row["map"], float(row["value"])) for row in rows]


def test_tables_are_those_of_python(run: Run, photos: Path, tmp_path: Path) -> None:
    options = (
        "--nulls",
        "2",
        "--steps",
        "3",
        "--methods",
        "relevance,gradcam",
        "--metrics",
        "saco,deletion",
        "--baseline",
        "image mean",
    )
    code, out, _ = run("evaluate", photos, *MODEL, *options, "--json", "-o", "out")
    assert code == 0
    model = visattn.load_model("scenes_vit")
    paths = [photos / "a.png", photos / "b.png"]
    found = evaluate(
        model, paths, ["relevance", "gradcam"], metrics=["saco", "deletion"], nulls=2, steps=3, baseline="image mean"
    )
    whole = json.loads(out)
    assert whole["rows"] == [pytest.approx(row) for row in json.loads(json.dumps(found.rows()))]
    table, expected = values(tmp_path / "out" / "evaluation.csv"), found.rows()
    assert [name for *name, _ in table] == [[row["metric"], row["map"]] for row in expected]
    assert [value for *_, value in table] == pytest.approx([row["value"] for row in expected])
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["rows"] == whole["rows"]
    code, again, _ = run("evaluate", photos, *MODEL, *options, "--json", "-o", "out")
    assert (code, again) == (0, out)


def test_maps_of_all_kinds_of_files(run: Run, photos: Path, tmp_path: Path) -> None:
    arrays = {name: np.random.default_rng(number).random((8, 8)) for number, name in enumerate(("a", "b"))}
    writers: dict[str, Any] = {
        "numbers": lambda path, array: np.savetxt(path.with_suffix(".txt"), array),
        "table": lambda path, array: np.savetxt(path.with_suffix(".csv"), array, delimiter=","),
        "arrays": lambda path, array: np.save(path.with_suffix(".npy"), array),
        "of_grad_cam": lambda path, array: np.save(path.with_suffix(".npy"), array[None].astype(np.float32)),
        "of_captum": lambda path, array: np.save(path.with_suffix(".npy"), np.stack([array / 3] * 3)[None]),
        "with_ending": lambda path, array: np.save(f"{path}.png.npy", array),
    }
    for kind, write in writers.items():
        (tmp_path / kind).mkdir()
        for name, array in arrays.items():
            write(tmp_path / kind / name, array)
    folders = [word for kind in writers for word in ("--maps", tmp_path / kind)]
    code, _, err = run("evaluate", photos, *MODEL, "--methods", "", *folders, *FEW, "-o", "out")
    assert code == 0, err
    found = values(tmp_path / "out" / "evaluation.csv")
    assert [name for _, name, _ in found] == list(writers)
    assert [value for *_, value in found] == pytest.approx([found[0][2]] * len(writers), abs=2e-3)  # float32 moves a pixel or two


def test_maps_that_were_saved_know_their_photo(run: Run, photos: Path, tmp_path: Path) -> None:
    model = visattn.load_model("scenes_vit")
    for kind in ("own", "other"):
        (tmp_path / kind).mkdir()
    for name, other in ("ab", "ba"):
        explained = visattn.explain(model, photos / f"{name}.png", method="relevance")
        explained.save_map(tmp_path / "own" / f"{name}.npz")
        explained.save_map(tmp_path / "other" / f"{other}.npz")
    words = ("--methods", "relevance", "--maps", "own", "--maps", "other")
    code, _, err = run("evaluate", photos, *MODEL, *words, *FEW, "-o", "out")
    assert (code, "other is left out: the map was made for another photo" in err) == (0, True)
    found = {name: value for _, name, value in values(tmp_path / "out" / "evaluation.csv", ["relevance", "own"])}
    assert found["own"] == pytest.approx(found["relevance"])


def test_masks(run: Run, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    mask = np.zeros((64, 64), np.uint8)
    mask[10:30, 20:40] = 255
    for name in ("a", "b"):
        Image.fromarray(mask).save(tmp_path / "masks" / f"{name}.png")
    code, _, err = run(
        "evaluate",
        photos,
        *MODEL,
        "--methods",
        "relevance",
        "--masks",
        "masks",
        "--metrics",
        "auroc",
        "--nulls",
        "1",
        "-o",
        "out",
    )
    assert code == 0, err
    ((metric, name, value),) = values(tmp_path / "out" / "evaluation.csv")
    model = visattn.load_model("scenes_vit")
    explained = [visattn.explain(model, photos / f"{stem}.png", method="relevance") for stem in ("a", "b")]
    expected = [float(visattn.evaluation.auroc(one.panel, mask, one.geometry)) for one in explained]
    assert (metric, name) == ("auroc", "relevance")
    assert value == pytest.approx(sum(expected) / 2)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--metrics", "auc"), 2, "unknown metric 'auc'"),
        (("--seed", "-1"), 2, "seed"),
        (("--metrics", "saco,saco"), 2, "two metrics have one name"),
        (("--maps", "maps", "--maps", "more/maps"), 2, "two maps have one name"),
        (("others", "--maps", "maps"), 2, "2 photos are called a"),
        (("--metrics", "auroc"), 2, "unknown metric 'auroc'"),
        (("--methods", "relevence"), 2, "relevance"),
        (("--methods", ""), 2, "a method or maps"),
        (("--maps", "nowhere"), 1, "nowhere: no such folder"),
        (("--maps", "photos"), 1, "photos"),
        (("--masks", "empty", "--metrics", "auroc"), 1, "empty: no file for a.png"),
        (("-o", "full"), 5, "full: holds other files"),
        (("-o", "photos/a.png"), 5, "a.png: a file, not a folder"),
    ],
)
def test_wrong_input_gets_one_line(words: tuple[str, ...], code: int, text: str, run: Run, photos: Path, tmp_path: Path) -> None:
    for name in ("empty", "full", "others", "maps", "more/maps"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(photos / "a.png", tmp_path / "others" / "a.png")
    (tmp_path / "full" / "notes.txt").write_text("mine")
    before = sorted(path.name for path in photos.iterdir())
    found, out, err = run("evaluate", photos, *MODEL, "--steps", "2", "--nulls", "1", *words)
    errors = [line for line in err.splitlines() if line.startswith("visattn: error")]
    assert (found != 0, out) == (True, ""), err
    assert text in err
    assert errors
    assert sorted(path.name for path in photos.iterdir()) == before
    assert not (tmp_path / "evaluation" / "evaluation.csv").exists()


def test_a_photo_that_cannot_be_read_does_not_stop_the_others(run: Run, photos: Path, tmp_path: Path) -> None:
    (photos / "aa.png").write_bytes(b"no picture")
    code, _, err = run("evaluate", photos, *MODEL, "--methods", "relevance", *FEW, "-o", "out")
    assert code == 1
    assert "aa.png" in err
    assert [row["photo"] for row in json.loads((tmp_path / "out" / "evaluation.json").read_text())["numbers"]] == [
        "a.png",
        "b.png",
    ]


def test_a_wrong_word_with_overwrite_keeps_the_run(run: Run, photos: Path, tmp_path: Path) -> None:
    words = ("evaluate", photos, *MODEL, "--methods", "relevance", *FEW, "-o", "out")
    assert run(*words)[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert run(*words, "--metrics", "nope", "--overwrite")[0] == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert run(*words, "--overwrite")[0] == 0


def test_a_run_without_any_number_has_failed(run: Run, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "maps").mkdir()
    for name in ("a", "b"):
        np.save(tmp_path / "maps" / f"{name}.npy", np.ones((300, 450)))
    code, _, err = run("evaluate", photos, *MODEL, "--methods", "", "--maps", "maps", *FEW, "-o", "out")
    assert code == 1
    assert "maps is left out: the map has 450 x 300 cells" in err or "maps is left out: the map has 300 x 450 cells" in err


def test_other_settings_need_a_new_folder_or_overwrite(run: Run, photos: Path) -> None:
    words = ("evaluate", photos, *MODEL, "--methods", "relevance", *FEW, "-o", "out")
    assert run(*words)[0] == 0
    code, _, err = run(*words, "--seed", "1")
    assert code != 0
    assert "other settings" in err
    assert run(*words, "--seed", "1", "--overwrite")[0] == 0
