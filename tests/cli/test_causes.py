"""Command `visattn causes`: tables beside a computation in Python, maps in folders, runs that go on, and wrong words."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_commands import Run, run
from visattn.evaluation import find_causes

__all__ = ["run"]

FEW = "--scenes", "2", "--only", "mark_cnn_0"
METHOD = "def gradient(model, pixels, label):\n    pixels = pixels.clone().requires_grad_()\n    model(pixels)[0, label].backward()\n    "


def test_tables_are_those_of_python(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{METHOD}return pixels.grad.abs()\n")
    code, out, _ = run("causes", "--method", "gradcam", "--method", "mine.py:gradient", *FEW, "--json", "-o", "out")
    assert code == 0
    whole = json.loads(out)
    found = find_causes({"gradcam": "gradcam"}, networks=["mark_cnn_0"], scenes=2).rows()[0]
    ours = next(row for row in whole["networks"] if row["map"] == "gradcam")
    assert {**ours, "p": 0, "found": ""} == pytest.approx({**found, "p": 0, "found": ""})  # Holm corrects for two rows here
    assert [row["map"] for row in whole["verdicts"]] == ["gradcam", "mine.py:gradient"]
    with (tmp_path / "out" / "causes.csv").open(newline="") as lines:
        assert [float(row["auroc"]) for row in csv.DictReader(lines)] == pytest.approx(
            [row["auroc"] for row in whole["networks"]]
        )
    assert "mark_cnn_0" in (tmp_path / "out" / "causes.html").read_text()
    (tmp_path / "mine.py").write_text(f"{METHOD}return -pixels.grad.abs()\n")
    code, again, _ = run("causes", "--method", "gradcam", "--method", "mine.py:gradient", *FEW, "--json", "-o", "out")
    assert code == 0
    before, after = ({row["map"]: row["auroc"] for row in json.loads(text)["networks"]} for text in (out, again))
    assert after["gradcam"] == before["gradcam"]
    assert after["mine.py:gradient"] == pytest.approx(1 - before["mine.py:gradient"])  # the file has changed, so it ran again


def test_a_changed_helper_is_another_method(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(f"from helper_of_mine import turned\n\n{METHOD}return turned(pixels.grad.abs())\n")
    numbers = []
    for sign in ("", "-"):
        (tmp_path / "helper_of_mine.py").write_text(f"def turned(x):\n    return {sign}x\n")
        monkeypatch.delitem(sys.modules, "helper_of_mine", raising=False)
        code, out, _ = run("causes", "--method", "mine.py:gradient", *FEW, "--json", "-o", "out")
        assert code == 0
        numbers.append(json.loads(out)["networks"][0]["auroc"])
    assert numbers[1] == pytest.approx(1 - numbers[0])


def test_a_wrong_word_with_overwrite_keeps_the_run(run: Run, tmp_path: Path) -> None:
    words = "causes", "--method", "gradcam", *FEW, "-o", "out"
    assert run(*words)[0] == 0
    before = (tmp_path / "out" / "causes.jsonl").read_bytes()
    assert run(*words, "--only", "nope", "--overwrite")[0] == 2
    assert (tmp_path / "out" / "causes.jsonl").read_bytes() == before


def test_maps_drawn_elsewhere(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("causes", "--export", "scenes", *FEW)
    assert (code, out.strip()) == (0, "scenes/maps.csv")
    with (tmp_path / "scenes" / "maps.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 4
    for number, row in enumerate(rows):
        assert (tmp_path / "scenes" / row["image"]).is_file()
        place = tmp_path / "scenes" / row["map"]
        place.parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(place.with_suffix(".txt"), np.random.default_rng(number).random((8, 8)))
    code, out, _ = run("causes", "--maps", "scenes", *FEW, "-o", "out", "--json")
    assert code == 0
    assert json.loads(out)["networks"][0]["cells"] == "8 x 8"
    code, _, told = run("causes", "--export", "scenes", *FEW)
    assert code > 0
    assert "is there already" in told


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "--method or --maps"),
        (["--method", "gradcm"], "gradcam"),
        (["--method", "none.py:mine"], "no such file"),
        (["--method", "mine.py:other"], "no function 'other'"),
        (["--method", "mine.py:fails"], "mine.py:fails fails: ZeroDivisionError"),
        (["--method", "mine.py:scalar"], "an array must be numbers"),
        (["--maps", "none"], "no such folder"),
        (["--method", "gradcam", "--method", "gradcam"], "two methods have one name"),
        (["--method", "gradcam", "--only", "makr"], "mark"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], text: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def fails(*_):\n    return 1 / 0\n\n\ndef scalar(*_):\n    return 3.0\n")
    code, out, told = run(
        "causes", "--scenes", "2", *([] if "--only" in words else ["--only", "mark_cnn_0"]), *words, "-o", "out"
    )
    assert (code > 0, out) == (True, "")
    assert text in told
    assert told.count("\n") == 1


def test_a_method_that_applies_to_no_network_is_an_error(run: Run) -> None:
    code, _, errors = run("causes", "--method", "attention", *FEW, "-o", "out")
    assert code == 1
    assert "attention is left out on mark_cnn_0" in errors
