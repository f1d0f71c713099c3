"""Labeled images by name and from arrays: exact content, and errors of one line for data that cannot be trained on."""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.making import Pixels, fashion, noise, one_line
from visattn import data
from visattn.data import ArrayDataset
from visattn.data.labeled import arrays, downloaded as published
from visattn.data.labeled.labeled_sets import LabeledDataset, load_labeled
from visattn.errors import DataError, OptionError


@pytest.mark.parametrize("shape", [(5, 4, 7), (5, 4, 7, 3)], ids=["gray", "rgb"])
def test_array_dataset_returns_its_pixels(shape: tuple[int, ...]) -> None:
    pixels = noise(*shape)
    pictures: LabeledDataset = ArrayDataset(pixels, [0, 1, 2, 1, 0], ("a", "b", "c"), "mine")
    assert (len(pictures), pictures.size, pictures.channels, pictures.classes) == (
        5,
        (4, 7),
        1 if len(shape) == 3 else 3,
        ("a", "b", "c"),
    )
    assert [pictures[i][1] for i in range(5)] == [0, 1, 2, 1, 0]
    assert all((np.asarray(pictures[i][0]) == pixels[i]).all() for i in range(5))
    assert pictures[0][0].mode == ("L" if len(shape) == 3 else "RGB")
    assert pictures.name(3) == "mine 3"


def test_array_fingerprint_changes_with_every_pixel_label_and_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_ROWS", 2)
    pixels, labels, classes = noise(5, 3, 4), [0, 1, 1, 0, 1], ["a", "b"]
    found = {ArrayDataset(pixels, labels, classes).fingerprint()}
    for index in np.ndindex(pixels.shape):
        changed = pixels.copy()
        changed[index] ^= 1
        found.add(ArrayDataset(changed, labels, classes).fingerprint())
    for i in range(5):
        found.add(ArrayDataset(pixels, [label ^ (i == j) for j, label in enumerate(labels)], classes).fingerprint())
    found.add(ArrayDataset(pixels, labels, ["a", "c"]).fingerprint())
    found.add(ArrayDataset(pixels.reshape(5, 4, 3), labels, classes).fingerprint())
    assert len(found) == 1 + 60 + 5 + 2


def test_array_fingerprint_depends_only_on_values() -> None:
    pixels, labels = noise(4, 3, 5), [0, 1, 1, 0]
    whole = ArrayDataset(pixels, labels, "ab", "one").fingerprint()
    assert whole == ArrayDataset(np.asfortranarray(pixels), np.array(labels, np.uint8), ("a", "b"), "two").fingerprint()


@pytest.mark.parametrize(
    ("pixels", "labels", "classes", "message"),
    [
        (noise(2, 3, 4), [0, 2], "ab", r"mine: labels must lie from 0 to 1, got 2 for image 1\. Correct it"),
        (noise(2, 3, 4), [-1, 1], "ab", r"labels must lie from 0 to 1, got -1 for image 0\."),
        (noise(3, 3, 4), [0, 1], "ab", r"mine: must have one label per image, got 3 images and 2 labels\."),
        (noise(0, 3, 4), [], "ab", r"mine: must hold two images or more, got none\. Add images\."),
        (noise(1, 3, 4), [0], "ab", r"mine: must hold two images or more, got 1\."),
        (noise(3, 3, 4), [1, 1, 1], "ab", r"must hold two classes or more, got 3 images of 'b' only\. Add"),
        (noise(2, 3, 4), [0.0, 1.0], "ab", r"labels must be integers of shape \(N,\), got float64 \(2,\)\."),
        (noise(2, 3, 4), [[0], [1]], "ab", r"labels must be integers of shape \(N,\), got int64 \(2, 1\)\."),
        (
            noise(2, 3, 4) / 255,
            [0, 1],
            "ab",
            r"pixels must be uint8 of shape .*, got float64 \(2, 3, 4\)\. Convert them to uint8, from 0 to 255\.$",
        ),
        (noise(2, 3, 4, 5), [0, 1], "ab", r"pixels must be uint8 of shape .*, got uint8 \(2, 3, 4, 5\)\."),
        (noise(2, 3), [0, 1], "ab", r"pixels must be uint8 of shape .*, got uint8 \(2, 3\)\."),
        (noise(2, 0, 4), [0, 1], "ab", r"pixels must be uint8 of shape .*, got uint8 \(2, 0, 4\)\."),
    ],
)
def test_unusable_arrays_are_refused(pixels: Pixels, labels: Any, classes: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        ArrayDataset(pixels, labels, classes, "mine")
    one_line(error)


def test_pickle_of_a_memory_mapped_array_maps_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = noise(40, 16, 16, 3)
    np.save(tmp_path / "pixels.npy", pixels)
    monkeypatch.chdir(tmp_path)
    pictures = ArrayDataset(np.load("pixels.npy", mmap_mode="r"), np.arange(40) % 2, "ab")
    content = pickle.dumps(pictures)
    assert len(content) < pixels.nbytes / 10
    monkeypatch.chdir("/")
    copy = pickle.loads(content)
    assert isinstance(copy.pixels, np.memmap)
    assert not copy.pixels.flags.writeable
    assert (copy.pixels == pixels).all()
    assert copy.fingerprint() == pictures.fingerprint()


@pytest.mark.parametrize("part", [slice(10, 30), slice(None, None, 2)], ids=["slice", "step"])
def test_pickle_of_a_slice_of_a_memory_mapped_array_stores_the_slice(tmp_path: Path, part: slice) -> None:
    pixels = noise(40, 3, 4)
    np.save(tmp_path / "pixels.npy", pixels)
    pictures = ArrayDataset(np.load(tmp_path / "pixels.npy", mmap_mode="r")[part], np.arange(20) % 2, "ab")
    assert (pickle.loads(pickle.dumps(pictures)).pixels == pixels[part]).all()


def test_pickle_keeps_changes_to_a_copy_on_write_array(tmp_path: Path) -> None:
    np.save(tmp_path / "pixels.npy", noise(4, 3, 4))
    pixels = np.load(tmp_path / "pixels.npy", mmap_mode="c")
    pixels[:] = 7
    assert (pickle.loads(pickle.dumps(ArrayDataset(pixels, [0, 1, 0, 1], "ab"))).pixels == 7).all()


def test_count_selects_a_balanced_random_subset_that_larger_counts_extend(tmp_path: Path) -> None:
    pixels, labels = noise(6000, 28, 28), np.repeat(np.arange(10), 600)
    fashion(tmp_path / "fashion", "train", pixels, labels)
    chosen = partial(load_labeled, "fashion-mnist", "train", root=tmp_path / "fashion")
    part = chosen(count=1000)
    kept = [int(part.name(i).split()[-1]) for i in range(1000)]
    assert len(set(kept)) == len(part) == 1000
    assert all((np.asarray(part[i][0]) == pixels[kept[i]]).all() and part[i][1] == labels[kept[i]] for i in range(0, 1000, 50))
    assert all(70 <= count <= 130 for count in np.bincount(labels[kept]))  # the standard deviation by chance is 9
    assert [chosen(count=100).name(i) for i in range(100)] == [part.name(i) for i in range(100)]
    assert chosen(count=100, seed=1).name(0) != part.name(0)
    assert (part.classes, part.channels, part.size) == (published.FASHION, 1, (28, 28))
    digests = {chosen(count=count, seed=seed).fingerprint() for count in (99, 100, None) for seed in (0, 1)}
    assert len(digests) == 5
    assert chosen(count=100).fingerprint() in digests


@pytest.mark.parametrize("count", [1, 0, -3])
@pytest.mark.parametrize("name", ["fashion-mnist", "scenes", "folder"])
def test_fewer_than_two_images_are_refused(name: str, count: int) -> None:
    with pytest.raises(DataError, match=rf"{name} train: count must be 2 or more, got {count}\.") as error:
        load_labeled(name, "train", count=count)
    one_line(error)


def test_count_above_the_number_of_images_is_refused(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"pets train: count must be at most 4, the number of images, got 5\. Lower it\."
    ) as error:
        load_labeled(str(folder), "train", count=5)
    one_line(error)


def test_misspelled_name_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"cifar-10: no such folder; did you mean 'cifar10'\? Pass a folder .*scenes-by-mark\."
    ) as error:
        load_labeled("cifar-10", "train")
    one_line(error)


def test_invalid_split_or_seed_is_refused() -> None:
    with pytest.raises(OptionError, match=r"unknown split 'val'\. Known: train, test\."):
        load_labeled("scenes", "val")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"seed must be a number from 0 to .*, got -1\."):
        load_labeled("scenes", "train", seed=-1)


def test_import_of_visattn_data_is_light() -> None:
    code = "import sys, visattn.data; print([m for m in ('torch', 'torchvision', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_scenes_are_available_after_importing_visattn() -> None:
    code = "import visattn; print(len(visattn.data.scenes.CLASSES))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "6"


def test_all_names_of_visattn_data_exist() -> None:
    assert data.load_labeled is load_labeled
    assert {"ArrayDataset", "LabeledDataset", "load_labeled"} <= set(dir(data))
    assert all(hasattr(data, name) for name in dir(data))
    with pytest.raises(AttributeError, match="no attribute 'reed'"):
        data.reed  # type: ignore[attr-defined]  # noqa: B018
