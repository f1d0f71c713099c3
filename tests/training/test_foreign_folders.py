"""Run folders from other people: nothing outside of them is read or written, and a refused run leaves no trace."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_commands import Run, run
from tests.training.small import begun, pictures, recipe, states, written
from visattn.errors import OutputError, VisattnError
from visattn.training import Config, compare_runs, train
from visattn.training.report.comparison import RECIPE
from visattn.training.run.folder import held

__all__ = ["run"]

FILES = [
    "config.toml",
    "result.json",
    "log.jsonl",
    "speed.jsonl",
    "README.md",
    "log.csv",
    "curves.png",
    ".lock",
    "nonfinite.jsonl",
]
FOLDERS = ["checkpoints", "final", "maps"]
WITHIN = ["checkpoints/step_00000004", "checkpoints/step_00000004/state.json", "final/model.json", "maps/step_00000002.png"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def half(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begun(recipe(data), tmp_path_factory.mktemp("half") / "run")


@pytest.fixture
def copied(half: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "run"))


def linked(path: Path) -> None:
    path.symlink_to(os.environ["VICTIM"])


def dangling(path: Path) -> None:
    path.symlink_to(os.environ["VICTIM"] + ".new")


def other(path: Path) -> None:
    """Replace a folder by a file, or a file by a folder."""
    path.write_text("") if path.name in FOLDERS or path.name.startswith("step_0000000") else path.mkdir()


def again(path: Path) -> None:
    os.link(os.environ["VICTIM"], path)


def contents(folder: Path) -> dict[str, Any]:
    """Read all entries of a folder."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        kind = path.lstat()
        found[str(path)] = (kind.st_mode, kind.st_mtime_ns, path.read_bytes() if path.is_file() else None)
    return found


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a file that must not change."""
    path = tmp_path / "victim"
    path.write_text("mine\n")
    monkeypatch.setenv("VICTIM", str(path))
    return path


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *((name, make) for name in (*FILES, *FOLDERS, *WITHIN) for make in (linked, dangling, os.mkfifo)),
        *((name, other) for name in (*FILES, *FOLDERS)),
        *((name, again) for name in FILES),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_links_out_of_a_run_folder_are_refused_before_anything_changes(
    data: Path, copied: Path, victim: Path, name: str, make: Callable[[Path], object]
) -> None:
    place = copied / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    make(place)
    before = contents(victim.parent)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=rf"{place.name}: (must be a|is hard-linked)") as caught:
            train(recipe(data), copied, overwrite=overwrite)
        assert "\n" not in str(caught.value)
    assert contents(victim.parent) == before


@pytest.mark.parametrize("name", [RECIPE, "comparison.md", "none", "se", "none/seed0", "none/seed0/.lock"])
def test_links_out_of_a_comparison_folder_are_refused(data: Path, tmp_path: Path, victim: Path, name: str) -> None:
    place = tmp_path / "run" / name
    place.parent.mkdir(parents=True)
    place.symlink_to(victim)
    before = contents(tmp_path)
    with pytest.raises(OutputError, match=rf"{place.name}: must be a .*, got a link; remove it, or choose another"):
        compare_runs(recipe(data), tmp_path / "run", ["se"], 1)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [".lock", "log.jsonl", "speed.jsonl"])
def test_link_created_after_the_check_is_not_followed(data: Path, tmp_path: Path, victim: Path, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("visattn.training.run.folder.check_own", lambda *_: None)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / name).symlink_to(victim)
        (tmp_path / "run" / "config.toml").write_text(recipe(data).toml())
        with pytest.raises(VisattnError):
            train(recipe(data), tmp_path / "run")
    assert victim.read_text() == "mine\n"


# Refused runs leave no trace


REFUSED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "device": lambda _: {"data": "/dev/zero"},
    "batch": lambda _: {"batch_size": 1000},
    "model": lambda _: {"model": "no_such_model", "widths": ()},
    "optimizer": lambda _: {"opt": "no_such"},
    "layer": lambda _: {"model_kwargs": {"no_such": 3}},
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused_start_leaves_no_files_and_a_corrected_command_works(run: Run, data: Path, tmp_path: Path, why: str) -> None:
    file = written(replace(recipe(data), **REFUSED[why](data)), tmp_path / "wrong.toml")
    for place in ("new", "a/b/c"):
        assert run("train", "classify", "-q", "--config", file, "-o", place)[0] in (2, 4)
    (tmp_path / "empty").mkdir()
    assert run("train", "classify", "-q", "--config", file, "-o", "empty")[0] in (2, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "wrong.toml"]
    assert not list((tmp_path / "empty").iterdir())
    right = written(recipe(data, epochs=0.4), tmp_path / "right.toml")
    assert run("train", "classify", "-q", "--config", right, "-o", "new")[0] == 0


def test_refused_start_with_maps_leaves_no_files(data: Path, tmp_path: Path) -> None:
    for picture in (data / "test").rglob("*.png"):
        assert picture.is_file()
    spoilt = Path(shutil.copytree(data, tmp_path / "spoilt"))
    for picture in (spoilt / "test").rglob("*.png"):
        picture.write_bytes(b"no picture")
    with pytest.raises(VisattnError, match="no test image can be read"):
        train(recipe(spoilt, maps_every=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("why", REFUSED)
def test_refused_overwrite_keeps_the_earlier_run(data: Path, copied: Path, why: str) -> None:
    before = contents(copied)
    with pytest.raises(VisattnError):
        train(replace(recipe(data), **REFUSED[why](data)), copied, overwrite=True)
    assert contents(copied) == before
    assert states(copied)


def test_overwrite_redraws_maps(data: Path, copied: Path) -> None:
    (copied / "maps").mkdir()
    (copied / "maps" / "step_00000099.png").write_bytes(b"")
    train(recipe(data, maps_every=4), copied, overwrite=True)
    assert [path.name for path in sorted((copied / "maps").iterdir())] == ["step_00000004.png", "step_00000008.png"]


@pytest.mark.parametrize("changes", [{"batch_size": 1000}, {"opt": "no_such"}], ids=str)
def test_refused_comparison_leaves_no_files(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    config: Config = recipe(data, **changes)
    with pytest.raises(VisattnError):
        compare_runs(config, tmp_path / "a" / "run", ["se"], 1)
    assert not list(tmp_path.iterdir())


def test_run_with_only_a_config_file_accepts_another_config(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(recipe(data, lr=0.9).toml())
    assert train(recipe(data, epochs=0.4), tmp_path / "run").steps == 1
    assert "lr = 0.05" in (tmp_path / "run" / "config.toml").read_text()


def test_lock_removed_during_acquisition_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(*_: object) -> None:
        (tmp_path / "run" / ".lock").unlink()

    monkeypatch.setattr("fcntl.lockf", removed)
    with pytest.raises(OutputError, match="another process is training here"), held(tmp_path / "run"):
        pytest.fail("held")
