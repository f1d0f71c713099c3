"""Advice of messages about labeled images in arrays and folders: followed literally, it works."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.advice.closing import Close, closed  # noqa: F401 - a fixture
from tests.data.making import noise, save
from tests.data.test_folders import flat
from visattn.data import ArrayDataset, load_labeled
from visattn.data.labeled.subsets import held_out
from visattn.data.scenes import Scenes, write
from visattn.errors import DataError, ImageError
from visattn.training import Config
from visattn.training.tasks.classification import Classification

OWN = """
import numpy as np
made = lambda split: [(np.zeros((4, 4), np.uint8), label) for label in (0, 1)]
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VISATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_arrays_are_changed_as_their_messages_say() -> None:
    gray, color = noise(4, 6, 5), noise(4, 6, 5, 3)
    with pytest.raises(DataError, match=r"two images or more, got 1\. Add images"):
        ArrayDataset(gray[:1], [0], "ab")
    with pytest.raises(DataError, match=r"two classes or more, got 4 images of 'a' only\. Add images of another class"):
        ArrayDataset(gray, [0, 0, 0, 0], "ab")
    with pytest.raises(DataError, match=r"labels must be integers of shape \(N,\), got float64 \(4, 2\)\. Pass class indices"):
        ArrayDataset(gray, np.eye(2)[[0, 1, 0, 1]], "ab")
    with pytest.raises(DataError, match=r"labels must lie from 0 to 1, got 2 for image 1\. Correct it, or name more classes"):
        ArrayDataset(gray, [0, 2, 0, 1], "ab")
    assert ArrayDataset(gray, [0, 1, 0, 1], "ab").labels.tolist() == [0, 1, 0, 1]
    assert ArrayDataset(gray, [0, 2, 0, 1], "abc").classes == ("a", "b", "c")
    with pytest.raises(
        DataError, match=r"got float64 \(4, 3, 6, 5\)\. Convert them to uint8, from 0 to 255\. Put channels last\.$"
    ):
        ArrayDataset(color.transpose(0, 3, 1, 2) / 255, [0, 1, 0, 1], "ab")
    scaled = (color.transpose(0, 3, 1, 2) / 255 * 255).round().astype(np.uint8).transpose(0, 2, 3, 1)
    assert np.array_equal(np.asarray(ArrayDataset(scaled, [0, 1, 0, 1], "ab")[2][0]), color[2])


def folder_of(place: Path, *names: str) -> Path:
    for name in names:
        save(place / name)
    return place


def test_images_of_a_missing_split_are_moved_or_split(tmp_path: Path) -> None:
    place = flat(tmp_path, {"a": 3, "b": 3})
    with pytest.raises(
        DataError, match=r"got no folder train but a, b\. Move .* there, or pass held_out=0\.2 \(split=0\.2 in a Config\) if"
    ):
        Classification(Config(data=str(place), img_size=32))
    assert [len(load_labeled(str(place), split, held_out=0.2)) for split in ("train", "test")] == [4, 2]
    task = Classification(Config(data=str(place), split=0.2, img_size=32))
    assert (len(task.pictures), len(task.tests)) == (4, 2)
    for name in "ab":
        for number, split in enumerate(("train", "train", "test")):
            (place / split / name).mkdir(parents=True, exist_ok=True)
            (place / name / f"{number:02}.png").rename(place / split / name / f"{number}.png")
        (place / name).rmdir()
    assert [len(load_labeled(str(place), split)) for split in ("train", "test")] == [4, 2]
    with pytest.raises(DataError, match=r"holds test, train already, .*\. Leave held_out \(split in a Config\) out"):
        Classification(Config(data=str(place), split=0.2, img_size=32))
    assert len(Classification(Config(data=str(place), img_size=32)).pictures) == 4


@pytest.mark.parametrize("fix", ["add", "rename", "remove"])
def test_other_classes_of_a_split_are_added_renamed_or_removed(fix: str, tmp_path: Path) -> None:
    place = folder_of(tmp_path / "p", *(f"{split}/{name}/1.png" for split in ("train", "test") for name in "ab"))
    folder_of(place, "train/dog/1.png", "test/hound/1.png")
    with pytest.raises(DataError, match=r"only in .*train: dog; only in .*test: hound\. Add, rename or remove these folders"):
        load_labeled(str(place), "train")
    if fix == "add":
        folder_of(place, "test/dog/1.png", "train/hound/1.png")
    elif fix == "rename":
        (place / "test" / "hound").rename(place / "test" / "dog")
    else:
        shutil.rmtree(place / "train" / "dog")
        shutil.rmtree(place / "test" / "hound")
    added = {"add": ("dog", "hound"), "rename": ("dog",), "remove": ()}[fix]
    assert load_labeled(str(place), "train").classes == ("a", "b", *added)


@pytest.mark.parametrize("fix", ["add", "remove"])
def test_a_class_without_images_is_filled_or_removed(fix: str, tmp_path: Path) -> None:
    place = folder_of(tmp_path / "p", *(f"{split}/{name}/1.png" for split in ("train", "test") for name in "abc"))
    (place / "train" / "c" / "1.png").unlink()
    with pytest.raises(DataError, match=r"got none for c\. Add some, or remove the class from train and test"):
        load_labeled(str(place), "train")
    if fix == "add":
        folder_of(place, "train/c/2.png")
    else:
        shutil.rmtree(place / "train" / "c")
        shutil.rmtree(place / "test" / "c")
    assert len(load_labeled(str(place), "train")) == (3 if fix == "add" else 2)


def test_scenes_of_both_splits_are_written(tmp_path: Path) -> None:
    write(Scenes(6, (48, 48)), tmp_path / "s")
    with pytest.raises(DataError, match=r"got scenes of one split\. Write both splits, into .*/s/train and .*/s/test"):
        load_labeled(str(tmp_path / "s"), "train")
    for seed, split in enumerate(("train", "test")):
        write(Scenes(40, (48, 48), seed=seed), tmp_path / "s" / split)
    assert [len(load_labeled(str(tmp_path / "s"), split)) for split in ("train", "test")] == [40, 40]


def test_class_folders_are_made_as_expected(tmp_path: Path) -> None:
    folder_of(tmp_path / "p", "train/1.png", "test/a/1.png", "test/b/1.png")
    with pytest.raises(
        DataError, match=r"train: must hold a folder of images for each class, got none\. Expected .*/train/CLASS/"
    ):
        load_labeled(str(tmp_path / "p"), "train")
    folder_of(tmp_path / "p", "train/a/1.png", "train/b/1.png")
    assert load_labeled(str(tmp_path / "p"), "train").classes == ("a", "b")
    place = flat(tmp_path, {"a": 2, "b": 1})
    with pytest.raises(DataError, match=r"class b: must have two images or more to be split, got one\. Add some"):
        load_labeled(str(place), "train", held_out=0.5)
    folder_of(place, "b/more.png")
    assert load_labeled(str(place), "train", held_out=0.5).labels.tolist() == [0, 1]


def test_permissions_of_a_class_folder_are_checked(public_folder: Path, closed: Close) -> None:  # noqa: F811
    place = folder_of(public_folder / "p", *(f"{split}/{name}/1.png" for split in ("train", "test") for name in "ab"))
    reopen = closed(place / "train" / "a")
    with pytest.raises(DataError, match=r"train/a: cannot be read \(permission denied\)\. Check its permissions"):
        load_labeled(str(place), "train")
    reopen()
    assert len(load_labeled(str(place), "train")) == 2


def test_names_and_counts_of_labeled_images_are_corrected(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "p", *(f"{split}/{name}/1.png" for split in ("train", "test") for name in "ab"))
    with pytest.raises(DataError, match=r"count must be 2 or more, got 1\. Raise it"):
        load_labeled(str(place), "train", count=1)
    with pytest.raises(DataError, match=r"count must be at most 2, the number of images, got 3\. Lower it"):
        load_labeled(str(place), "train", count=3)
    with pytest.raises(
        DataError, match=r"gone: no such folder\. Pass a folder that holds train/CLASS/image\.png, file\.py:factory, or"
    ):
        load_labeled(str(tmp_path / "gone"), "train")
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", place)
    with pytest.raises(DataError, match=r"packed\.zip: must be a folder, got a file\. If it is an archive, unpack it and pass"):
        load_labeled(packed, "train")
    shutil.unpack_archive(packed, tmp_path / "unpacked")
    (tmp_path / "own.py").write_text(OWN)
    for data in (place, tmp_path / "unpacked", f"{tmp_path / 'own.py'}:made"):
        assert len(load_labeled(str(data), "train", count=2)) == 2
    assert len(load_labeled("scenes", "train", count=2, size=(48, 48))) == 2


def test_validation_gets_images_or_is_left_out(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "p", "train/a/1.png", "train/a/2.png", "train/b/1.png", "test/a/1.png", "test/b/1.png")
    config: dict[str, Any] = {"data": str(place), "img_size": 32}
    with pytest.raises(DataError, match=r"class 'b' has one training image, so none .*\. Add images, or leave validation out\.$"):
        Classification(Config(**config, validation=0.5))
    assert len(Classification(Config(**config)).pictures) == 3
    folder_of(place, "train/b/2.png")
    assert [len(part) for part in held_out(load_labeled(str(place), "train"), 0.5, 0)] == [2, 2]


def test_damaged_scenes_are_removed_and_drawn_again(cache: Path) -> None:
    pixels = np.asarray(load_labeled("scenes", "train", count=3, size=(48, 48))[1][0])
    (place,) = (cache / "scenes").iterdir()
    (place / "pixels.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"must hold 3 scenes, got damaged files\. Remove this folder"):
        load_labeled("scenes", "train", count=3, size=(48, 48))
    shutil.rmtree(place)
    assert np.array_equal(np.asarray(load_labeled("scenes", "train", count=3, size=(48, 48))[1][0]), pixels)


@pytest.mark.parametrize(
    ("pixels", "message", "mended"),
    [
        (noise(2, 3, 4) / 1, r"Convert them to uint8, from 0 to 255\.$", noise(2, 3, 4)),
        (noise(2, 3, 4, 3).astype(int), r"Convert them to uint8, from 0 to 255\.$", noise(2, 3, 4, 3)),
        (noise(2, 3, 4, 1), r"\(2, 3, 4, 1\)\. Drop the axis of length 1\.$", noise(2, 3, 4, 1)[..., 0]),
        (noise(2, 1, 3, 4), r"\(2, 1, 3, 4\)\. Drop the axis of length 1\.$", noise(2, 1, 3, 4)[:, 0]),
        (noise(2, 3, 4, 4), r"\(2, 3, 4, 4\)\. Drop the fourth channel\.$", noise(2, 3, 4, 4)[..., :3]),
        (noise(2, 3, 5, 6), r"\(2, 3, 5, 6\)\. Put channels last\.$", noise(2, 3, 5, 6).transpose(0, 2, 3, 1)),
        (noise(2, 5, 6, 2), r"\(2, 5, 6, 2\)\.$", noise(2, 5, 6, 2)[..., 0]),
    ],
    ids=["floats", "integers", "one channel", "one channel first", "four channels", "channels first", "two channels"],
)
def test_pixels_of_another_shape_or_type_are_told_their_own_fix(pixels: Any, message: str, mended: Any) -> None:
    with pytest.raises(DataError, match=message):
        ArrayDataset(pixels, [0, 1], "ab")
    assert len(ArrayDataset(mended, [0, 1], "ab")) == 2


def test_a_class_that_only_train_has_is_added_to_test(tmp_path: Path) -> None:
    place = folder_of(tmp_path, "train/a/1.png", "train/b/1.png", "test/a/1.png")
    with pytest.raises(DataError, match=r"only in .*/train: b\. Add, rename or remove"):
        load_labeled(str(place), "train")
    folder_of(place, "test/b/1.png")
    assert load_labeled(str(place), "train").classes == ("a", "b")


def test_a_class_without_images_of_a_flat_folder_is_removed(tmp_path: Path) -> None:
    place = flat(tmp_path, {"a": 3, "b": 3})
    (place / "c").mkdir()
    with pytest.raises(DataError, match=r"got none for c\. Add some, or remove its folder\.$"):
        load_labeled(str(place), "train", held_out=0.2)
    (place / "c").rmdir()
    assert load_labeled(str(place), "train", held_out=0.2).classes == ("a", "b")


def test_a_flat_folder_may_have_a_class_named_train(tmp_path: Path) -> None:
    place = flat(tmp_path, {"train": 3, "bus": 3})
    with pytest.raises(
        DataError, match=r"Expected .*/train/CLASS/image\.png, or pass held_out=0\.2 .* if bus, train are the classes"
    ):
        load_labeled(str(place), "train")
    assert load_labeled(str(place), "train", held_out=0.2).classes == ("bus", "train")


@pytest.mark.parametrize("some", [False, True], ids=["none is read", "one is read"])
def test_formats_are_named_where_all_files_have_others(some: bool, tmp_path: Path) -> None:
    folders = [tmp_path / split / name for split in ("train", "test") for name in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "1.heic").write_bytes(b"x")
    if some:
        save(folders[0] / "2.png")
    with pytest.raises(
        DataError, match=rf"must have images \(PNG, JPEG, .*\), got none for {'' if some else 'a, '}b\. Add some\.$"
    ):
        load_labeled(str(tmp_path), "train")
    for folder in folders:
        save(folder / "1.jpg")
    assert load_labeled(str(tmp_path), "train").classes == ("a", "b")


def test_a_file_in_python_is_passed_with_its_function(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"{OWN}factory = made")
    with pytest.raises(DataError, match=r"own\.py: must be a folder, got a file\. Pass .*/own\.py:factory\.$") as caught:
        load_labeled(str(file), "train")
    assert len(load_labeled(str(caught.value).rpartition("Pass ")[2].rstrip("."), "train")) == 2


def test_a_photo_that_is_too_large_is_scaled_down(tmp_path: Path) -> None:
    place = folder_of(tmp_path, *(f"{split}/{name}/1.png" for split in ("train", "test") for name in "ab"))
    Image.new("1", (9000, 8000)).save(place / "train" / "a" / "1.png")
    data = load_labeled(str(place), "train")
    with pytest.raises(ImageError, match=r"exceed the limit of .* million; scale the image down$"):
        data[0]
    Image.new("1", (900, 800)).save(place / "train" / "a" / "1.png")
    assert data[0][0].size == (900, 800)


def test_permissions_of_the_folder_around_are_checked(public_folder: Path, closed: Close) -> None:  # noqa: F811
    place = folder_of(public_folder / "outer" / "p", *(f"{split}/{name}/1.png" for split in ("train", "test") for name in "ab"))
    reopen = closed(place.parent)
    with pytest.raises(
        DataError, match=r"p: cannot be read \(permission denied\)\. Check its permissions and those of its folder"
    ):
        load_labeled(str(place), "train")
    reopen()
    assert len(load_labeled(str(place), "train")) == 2


def test_permissions_of_drawn_scenes_are_checked(
    public_folder: Path,
    closed: Close,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VISATTN_CACHE", str(public_folder))
    load_labeled("scenes", "train", count=3, size=(48, 48))
    reopen = closed(next(public_folder.rglob("pixels.npy")))
    with pytest.raises(DataError, match=r"pixels\.npy: cannot be read \(permission denied\)\. Check its permissions"):
        load_labeled("scenes", "train", count=3, size=(48, 48))
    reopen()
    assert len(load_labeled("scenes", "train", count=3, size=(48, 48))) == 3
