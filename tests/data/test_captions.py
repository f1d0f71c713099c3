"""Captioned images by name: splits, counts, fingerprints, scenes."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.captioned import Split, a_name, in_test, lines, picture, refused, shade, told
from visattn.data.captions.caption_sets import CaptionDataset, load_captions
from visattn.data.scenes import NEW, Scenes, store
from visattn.errors import OptionError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache."""
    monkeypatch.setenv("VISATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def many(tmp_path: Path) -> Path:
    for number in range(60):
        picture(tmp_path / "images" / f"{number}.png", number)
    return lines(tmp_path / "many.jsonl", *({"image": f"{n}.png", "caption": f"number {n}"} for n in range(60)))


def test_images_without_a_split_are_assigned_by_a_hash_of_their_name(many: Path) -> None:
    train, test = (list(told(load_captions(str(many), split))) for split in ("train", "test"))
    assert train + test != sorted(train + test)
    assert sorted(train + test) == sorted(f"{n}.png" for n in range(60))
    assert test == [f"{n}.png" for n in range(60) if in_test(f"{n}.png")]
    assert 0 < len(test) < 20


def test_adding_images_does_not_change_the_split_of_others(many: Path) -> None:
    before = told(load_captions(str(many), "test"))
    picture(many.parent / "images" / a_name(True, "new"))
    added = {"image": a_name(True, "new"), "caption": "new"}
    many.write_text(json.dumps(added) + "\n" + many.read_text())
    assert told(load_captions(str(many), "test")) == before | {added["image"]: ("new",)}


def test_one_name_in_ten_is_in_test() -> None:
    assert 900 < sum(in_test(f"{number}.jpg") for number in range(10_000)) < 1100


def test_count_selects_random_images_and_larger_counts_extend_smaller_ones(many: Path) -> None:
    read = partial(load_captions, str(many), "train")
    whole = told(read())
    ten, five = list(told(read(count=10))), list(told(read(count=5)))
    assert ten[:5] == five
    assert len(set(ten)) == 10
    assert set(ten) <= set(whole)
    assert ten != list(whole)[:10]
    assert list(told(read(count=10, seed=1))) != ten
    assert sorted(told(read(count=len(whole)))) == sorted(whole)
    for index, name in enumerate(ten):
        assert shade(read(count=10), index) == int(Path(name).stem)
    refused(many, rf"train: count must be at most {len(whole)}, the number of images, got 61\. Lower it\.", count=61)
    refused(many, r"train: count must be 1 or more, got 0\.", count=0)


def test_fingerprint_does_not_depend_on_the_location_of_the_files(own: Path, tmp_path: Path) -> None:
    first = load_captions(str(own), "train").fingerprint()
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert load_captions(str(own), "train").fingerprint() == first
    shutil.copytree(tmp_path / "photos", tmp_path / "moved" / "images" / "photos")
    moved = shutil.copy(own, tmp_path / "moved" / "other.jsonl")
    assert load_captions(str(moved), "train").fingerprint() == first


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a dog", "a dot"),
        ('"a dog", "A dog runs."', '"A dog runs.", "a dog"'),
        ('"a dog", "A dog runs."', '"a dog A dog runs."'),
        ('["a dog", "A dog runs."]', '["a dog"]'),
        ("photos/3", "photos/1b"),
        ('"caption": "a cat", "split": "test"', '"caption": "a cat", "split": "train"'),
    ],
)
def test_fingerprint_changes_with_every_caption_and_name(own: Path, tmp_path: Path, old: str, new: str) -> None:
    shutil.copy(tmp_path / "photos" / "3.png", tmp_path / "photos" / "1b.png")
    first = load_captions(str(own), "train").fingerprint()
    assert old in own.read_text()
    own.write_text(own.read_text().replace(old, new))
    assert load_captions(str(own), "train").fingerprint() != first


def test_fingerprint_changes_with_count_split_and_file_size(own: Path, tmp_path: Path) -> None:
    found = {load_captions(str(own), "train", count=count).fingerprint() for count in (None, 2, 3)}
    found.add(load_captions(str(own), "test").fingerprint())
    with (tmp_path / "photos" / "0.png").open("ab") as stream:
        stream.write(b"\0")
    found.add(load_captions(str(own), "train").fingerprint())
    assert len(found) == 5


def test_pickle_round_trip_keeps_the_dataset(many: Path) -> None:
    pictures = load_captions(str(many), "train")
    content = pickle.dumps(pictures)
    again = pickle.loads(content)
    assert told(again) == told(pictures)
    assert again.fingerprint() == pictures.fingerprint()
    with pytest.raises(IndexError):
        pictures.captions(60)


def pairs(caption: str) -> list[tuple[str, str]]:
    """Return color and shape of each thing."""
    return [(words[1], words[2]) for words in (thing.split() for thing in caption.split(", "))]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scenes", {"pairs": "known", "margin": 0.03}),
        ("scenes-new", {"pairs": "new", "margin": 0.03}),
        ("scenes-any", {"pairs": "all", "margin": 0.0}),
    ],
)
@pytest.mark.parametrize(("split", "number"), [("train", 7), ("test", 8)])
def test_scenes_match_their_seed_and_captions(name: str, options: Any, split: Split, number: int) -> None:
    pictures = load_captions(name, split, count=6, size=(48, 56), seed=3)
    assert (len(pictures), pictures.size, pictures.channels) == (6, (48, 56), 3)
    scenes = Scenes(6, (48, 56), seed=number, distractors=(0, 2), **options)
    for index in range(6):
        image, captions = pictures[index]
        assert (np.asarray(image) == scenes.scene(index).image).all()
        assert captions == pictures.captions(index) == (scenes.scene(index).caption,)
        assert 1 <= len(pairs(captions[0])) <= 3
        assert pictures.name(index) == f"{name} {split} {index}"
        if name != "scenes-any":
            assert bool(NEW.intersection(pairs(captions[0]))) == (name == "scenes-new")


def test_captioned_scenes_are_cached_separately_from_labeled_scenes(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    read: Callable[[], CaptionDataset] = partial(load_captions, "scenes", "train", count=5, size=(48, 48))
    first = read()
    store.drawn("scenes", "train", 5, (48, 48))
    assert sorted(folder.name for folder in (cache / "scenes").iterdir()) == [
        "captions-scenes-1.3-48x48-1-5",
        "scenes-1.3-48x48-1-5",
    ]
    monkeypatch.setattr(Scenes, "scene", None)
    again = pickle.loads(pickle.dumps(read()))
    assert len(pickle.dumps(again)) < 2000
    assert again.fingerprint() == first.fingerprint()
    assert (np.asarray(again[4][0]) == np.asarray(first[4][0])).all()
    assert again.captions(4) == first.captions(4)
    with pytest.raises(IndexError):
        again[5]


def test_scenes_drawn_in_parts_keep_their_captions(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    read: Callable[[], CaptionDataset] = partial(load_captions, "scenes", "train", count=7, size=(48, 48))
    whole = [read().captions(i) for i in range(7)]
    shutil.rmtree(cache)
    monkeypatch.setattr(store, "_PART", 2)
    assert [read().captions(i) for i in range(7)] == whole
    assert len({len(caption) for (caption,) in whole}) > 1


def test_scene_fingerprint_changes_with_kind_split_seed_size_and_count() -> None:
    small = partial(load_captions, count=3, size=(48, 48))
    made = [
        small("scenes", "train"),
        small("scenes", "test"),
        small("scenes-new", "test"),
        small("scenes-any", "test"),
        small("scenes", "train", seed=1),
        small("scenes", "train", size=(48, 49)),
        small("scenes", "train", count=4),
    ]
    assert len({pictures.fingerprint() for pictures in made}) == len(made)
    assert small("scenes", "train").fingerprint() == made[0].fingerprint()


def test_scene_fingerprint_changes_with_captions(cache: Path) -> None:
    read: Callable[[], CaptionDataset] = partial(load_captions, "scenes", "train", count=3, size=(48, 48))
    before = read().fingerprint()
    (file,) = cache.rglob("captions.npy")
    captions = np.load(file)
    captions[1] = captions[0]
    np.save(file, captions)
    assert read().fingerprint() != before


@pytest.mark.parametrize("name", ["pixels.npy", "captions.npy"])
def test_a_damaged_cache_is_refused(name: str, cache: Path) -> None:
    load_captions("scenes", "train", count=3, size=(48, 48))
    (file,) = cache.rglob(name)
    file.write_bytes(file.read_bytes()[:150])
    refused("scenes", r"captions-scenes-.*: must hold 3 scenes, got damaged files\. Remove this folder\.", count=3, size=(48, 48))


def test_invalid_size_or_count_is_refused() -> None:
    with pytest.raises(OptionError, match="count must be 1 or more"):
        load_captions("scenes", "train", size=(20, 20))
    refused("scenes", "scenes train: count must be 1 or more, got 0", count=0)
