"""Cached scenes: drawn once, then memory-mapped; by one process or several."""

from __future__ import annotations

import os
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tests.data.making import one_line
from visattn.data import ArrayDataset
from visattn.data.labeled.labeled_sets import load_labeled
from visattn.data.scenes import CLASSES, VERSION, Scenes, store
from visattn.errors import DataError, OutputError, ResourceError


@pytest.mark.parametrize(("name", "watermark"), [("scenes", "none"), ("scenes-shortcut", "label"), ("scenes-conflict", "random")])
@pytest.mark.parametrize(("split", "seed"), [("train", 7), ("test", 8)])
def test_drawn_scenes_match_their_seed(name: str, watermark: Any, split: Literal["train", "test"], seed: int) -> None:
    pictures, scenes = (
        load_labeled(name, split, count=12, size=(48, 56), seed=3),
        Scenes(12, (48, 56), seed=seed, watermark=watermark),
    )
    assert (len(pictures), pictures.size, pictures.channels, pictures.classes) == (12, (48, 56), 3, CLASSES)
    assert pictures.name(5) == f"{name} {split} 5"
    for i in range(12):
        assert (np.asarray(pictures[i][0]) == scenes.scene(i).image).all()
        assert pictures[i][1] == scenes.scene(i).label


def test_grounds_match_the_scenes_without_objects() -> None:
    pictures, scenes = load_labeled("scenes-ground", "test", count=6, size=(48, 48)), Scenes(6, (48, 48), seed=2)
    for i in range(6):
        assert (np.asarray(pictures[i][0]) == scenes.scene(i).ground).all()
        assert pictures[i][1] == scenes.scene(i).label


def test_scenes_are_drawn_once_and_then_memory_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_labeled("scenes", "train", count=12, size=(48, 48))
    monkeypatch.setattr(Scenes, "scene", None)
    again = load_labeled("scenes", "train", count=12, size=(48, 48))
    assert isinstance(again, ArrayDataset)
    assert isinstance(again.pixels, np.memmap)
    assert not again.pixels.flags.writeable
    assert (np.asarray(again[7][0]) == np.asarray(first[7][0])).all()
    assert again.fingerprint() == first.fingerprint()
    assert len(pickle.dumps(again)) < 2000


def test_scene_fingerprint_changes_with_version_kind_seed_count_and_size(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    small = partial(load_labeled, "scenes", "train", count=12, size=(48, 48))
    made = [
        small(),
        small(count=13),
        small(size=(48, 49)),
        small(seed=1),
        load_labeled("scenes", "test", count=12, size=(48, 48)),
        load_labeled("scenes-shortcut", "train", count=12, size=(48, 48)),
    ]
    monkeypatch.setattr(store, "VERSION", VERSION + 1)
    made.append(small())
    assert len(list((cache / "scenes").iterdir())) == len(made)
    assert len({pictures.fingerprint() for pictures in made}) == len(made)


def test_several_processes_draw_the_same_scenes_as_one(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(store, "_PART", 7)
    alone = load_labeled("scenes", "train", count=24, size=(48, 48))
    pixels = np.array([np.asarray(alone[i][0]) for i in range(24)])
    shutil.rmtree(cache)
    asked = []

    def cores() -> int:
        asked.append(2)
        return 2

    monkeypatch.setattr(store, "_ALONE", 10)
    monkeypatch.setattr(store, "_cores", cores)
    many = load_labeled("scenes", "train", count=24, size=(48, 48))
    assert len(asked) == 2
    assert (np.array([np.asarray(many[i][0]) for i in range(24)]) == pixels).all()
    assert [many[i][1] for i in range(24)] == [alone[i][1] for i in range(24)]


def test_dead_drawing_process_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(store, "_ALONE", 10)
    monkeypatch.setattr(store, "_cores", lambda: 2)
    monkeypatch.setattr(Scenes, "scene", lambda scenes, index: os._exit(9))
    with pytest.raises(ResourceError, match="the processes that draw scenes died; free some memory"):
        load_labeled("scenes", "train", count=24, size=(48, 48))
    assert not list((cache / "scenes").iterdir())


def test_interrupted_drawing_leaves_no_files(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    draw = Scenes.scene

    def interrupted(scenes: Scenes, index: int) -> Any:
        if index == 5:
            raise KeyboardInterrupt
        return draw(scenes, index)

    monkeypatch.setattr(Scenes, "scene", interrupted)
    monkeypatch.setattr(store, "_PART", 2)
    with pytest.raises(KeyboardInterrupt):
        load_labeled("scenes", "train", count=12, size=(48, 48))
    assert not list((cache / "scenes").iterdir())


def test_second_process_uses_the_scenes_of_the_first(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    draw = store._draw

    def overtaken(scenes: Scenes, folder: Path, *, ground: bool) -> None:
        draw(scenes, folder, ground=ground)
        draw(scenes, folder, ground=ground)

    monkeypatch.setattr(store, "_draw", overtaken)
    assert len(load_labeled("scenes", "train", count=12, size=(48, 48))) == 12
    assert len(list((cache / "scenes").iterdir())) == 1


def test_unwritable_cache_is_refused(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(OutputError, match="is a file, not a folder"):
        load_labeled("scenes", "train", count=12, size=(48, 48))


@pytest.mark.parametrize("name", ["pixels.npy", "labels.npy"])
@pytest.mark.parametrize("length", [0, 5, 150])
def test_damaged_cache_is_refused_with_a_fix(name: str, length: int, cache: Path) -> None:
    load_labeled("scenes", "train", count=12, size=(48, 48))
    (folder,) = (cache / "scenes").iterdir()
    (folder / name).write_bytes((folder / name).read_bytes()[:length])
    with pytest.raises(
        DataError, match=rf"{folder.name}: must hold 12 scenes, got damaged files\. Remove this folder\."
    ) as error:
        load_labeled("scenes", "train", count=12, size=(48, 48))
    one_line(error)
