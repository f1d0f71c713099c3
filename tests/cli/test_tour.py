"""`visattn` without a command: five commands for the folder, in ten lines, without a library."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_commands import Run, run  # noqa: F401 - a fixture
from visattn.cli.help import COMMANDS
from visattn.cli.without_command import tour
from visattn.data import photo_path


def commands(folder: Path) -> list[list[str]]:
    lines = [line.strip() for line in tour(folder).splitlines() if line.startswith("  visattn")]
    return [shlex.split(line.split("  ")[0]) for line in lines]


def test_an_empty_folder_begins_with_the_demo(tmp_path: Path) -> None:
    found = commands(tmp_path)
    assert found[0] == ["visattn", "demo"]
    assert len(found) == 5
    assert all("photo:chelsea" in words for words in found[1:])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("my dog.JPG", ["visattn", "overlay", "my dog.JPG"]),
        ("-x.png", ["visattn", "view", "./-x.png"]),
        ("clip.mp4", ["visattn", "video", "clip.mp4"]),
        ("cat.attn", ["visattn", "view", "cat.attn"]),
        ("many/a.jpg", ["visattn", "batch", "many"]),
        ("net.pth", ["visattn", "overlay", "photo:chelsea", "--model", "NAME", "--weights", "net.pth"]),
        ("run 1/model.json", ["visattn", "overlay", "photo:chelsea", "--model", "run 1"]),
    ],
)
def test_what_lies_in_the_folder_is_named(tmp_path: Path, name: str, expected: list[str]) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert expected in commands(tmp_path)


def test_a_folder_of_everything_has_ten_lines_and_commands_that_exist(tmp_path: Path, run: Run) -> None:  # noqa: F811
    for name in ("a.jpg", "b.mp4", "c.attn", "d.pth"):
        (tmp_path / name).touch()
    assert len(tour(tmp_path).splitlines()) <= 10
    for words in commands(tmp_path):
        assert words[1] in COMMANDS
        _, shown, _ = run(words[1], "--help")
        assert not [word for word in words if word.startswith("--") and word not in shown]


def test_a_folder_that_cannot_be_read_is_as_an_empty_one(tmp_path: Path) -> None:
    assert commands(tmp_path / "nothing") == commands(tmp_path)


def test_without_a_command_no_library_is_loaded(tmp_path: Path) -> None:
    shutil.copy(photo_path("rocket"), tmp_path / "rocket.jpg")
    code = (
        "import sys; from visattn.cli import main; sys.argv = ['visattn']; main();"
        "print([name for name in ('torch', 'click', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "visattn overlay rocket.jpg" in done.stdout
    assert done.stdout.endswith("[]\n")
