"""Many photos in one command: an error of one photo never stops the others. That memory stays, `make evidence` shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_commands import COLORED, NAMED, TINY, Run, run
from visattn import captioning
from visattn.core.pipeline import running
from visattn.core.pipeline.inputs import Prepared
from visattn.errors import MapError
from visattn.evaluation import survey

__all__ = ["run"]  # a fixture


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    """Write three photos; the second is smaller."""
    sizes = {"a.png": (60, 90), "b.png": (30, 40), "c.png": (80, 90)}
    for seed, (name, size) in enumerate(sizes.items()):
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / name)
    return list(sizes)


def test_map_of_another_photo_is_drawn_with_a_warning(run: Run, photos: list[str]) -> None:
    first, second = photos[0], photos[2]
    assert run("overlay", first, *TINY, *COLORED, "--method", "rollout", "--save-map", "m.npz")[0] == 0
    assert "another file" not in run("overlay", first, *COLORED, "--map", "m.npz", "-o", "same.png")[2]
    code, _, err = run("overlay", second, *COLORED, "--map", "m.npz", "-o", "other.png")
    assert code == 0
    assert "warning: c.png: the map was computed for another file (a.png)" in err


def test_the_path_comes_first_and_notes_are_told_once(run: Run, photos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr("click.echo", lambda text="", err=False, **_: printed.append(text))
    code, _, _ = run("overlay", *photos, *TINY, "--method", "attention", "-o", "out")
    assert code == 0
    assert [text for text in printed if text.startswith("out/")] == [f"out/{name}.{NAMED}.attention.png" for name in "abc"]
    parts = "\n".join(printed).split("out/")[1:]
    assert [part.splitlines()[1].partition(" (")[0] for part in parts] == [f"visattn: {name}.png: attention" for name in "abc"]
    assert [len([text for text in part.splitlines() if "the weights are random" in text]) for part in parts] == [1, 0, 0]
    assert "visattn: warning: c.png: 1 warning as above" in parts[2].splitlines()
    assert max(map(len, parts[2].splitlines())) < 130


def test_query_outside_one_photo_does_not_stop_the_others(run: Run, photos: list[str], tmp_path: Path) -> None:
    code, out, err = run("overlay", *photos, *TINY, "--method", "attention", "--query", "pixel:85,50", "-o", "out", "--quiet")
    assert (code, out.split()) == (1, [f"out/{name}.{NAMED}.attention.pixel_85_50.png" for name in "ac"])
    assert re.search(r"^visattn: error: b\.png: .*85", err, re.MULTILINE)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"a.{NAMED}.attention.pixel_85_50.png",
        f"c.{NAMED}.attention.pixel_85_50.png",
    ]


def test_internal_error_on_one_photo_does_not_stop_the_others(
    run: Run, photos: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = running.explained

    def faulty(model: Any, prepared: list[Prepared], question: Any, **options: Any) -> Any:
        if prepared[0].photo.width == 40:
            raise KeyError("nobody thought of it")
        return whole(model, prepared, question, **options)

    monkeypatch.setattr(running, "explained", faulty)
    code, out, err = run("overlay", *photos, *TINY, "-o", "out", "--quiet", "--json")
    assert code == 70
    assert [Path(row["output"]).name for row in json.loads(out)] == [f"a.{NAMED}.overlay.png", f"c.{NAMED}.overlay.png"]
    assert "visattn: error: b.png: internal error of visattn (KeyError: 'nobody thought of it'). Please report it" in err


@pytest.mark.parametrize("broken", [["a.png"], ["b.png"], ["c.png"], ["a.png", "c.png"]], ids=" ".join)
def test_unreadable_photo_does_not_stop_the_others(broken: list[str], run: Run, photos: list[str], tmp_path: Path) -> None:
    for name in broken:
        (tmp_path / name).write_bytes(b"no photo")
    code, out, err = run("overlay", *photos, *TINY, "-o", "out", "--quiet")
    assert code == 1
    assert out.split() == [f"out/{name[0]}.{NAMED}.overlay.png" for name in photos if name not in broken]
    assert re.findall(r"error: (\w\.png): not an image", err) == broken


def test_exit_code_is_that_of_the_cause_if_nothing_is_drawn(run: Run, photos: list[str], tmp_path: Path) -> None:
    assert run("overlay", *photos, *TINY, "--method", "attention", "--query", "pixel:500,1", "-o", "out")[0] == 2
    for name in photos:
        (tmp_path / name).write_bytes(b"no photo")
    assert run("overlay", *photos, *TINY, "-o", "out")[0] == 3


def test_statistics_leave_out_a_photo_that_fails(
    run: Run, photos: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = survey.Survey.add

    def faulty(self: survey.Survey, photo: Image.Image, name: str) -> None:
        if photo.width == 40:
            raise MapError("attention of it is NaN.")
        whole(self, photo, name)

    monkeypatch.setattr(survey.Survey, "add", faulty)
    code, out, err = run("stats", ".", *TINY, "-o", "numbers", "--json", "--quiet")
    assert (code, err.splitlines()[0]) == (1, "visattn: error: b.png: attention of it is NaN.")
    assert [row["photo"] for row in json.loads(out)["photos"]] == ["a.png", "c.png"]


def test_failing_caption_does_not_stop_the_others(
    run: Run, photos: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = captioning.Captioner.generate

    def faulty(self: captioning.Captioner, shown: list[Image.Image], **options: Any) -> Any:
        if any(photo.width == 40 for photo in shown):
            raise MapError("attention of it is NaN.")
        return whole(self, shown, **options)

    monkeypatch.setattr(captioning.Captioner, "generate", faulty)
    checkpoint = Path(__file__).parents[2] / "models" / "captions_soft"
    code, out, err = run("caption", *photos, "--checkpoint", checkpoint, "--quiet")
    assert [line.split(":")[0] for line in out.splitlines()] == ["a.png", "c.png"]
    assert (code, [line for line in err.splitlines() if ": warning: " not in line]) == (
        1,
        ["visattn: error: b.png: attention of it is NaN."],
    )
