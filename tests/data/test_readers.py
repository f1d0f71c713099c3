"""Labelled pictures by name: what is read is what is there, and what cannot be learned from is refused in one line (T07)."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from torchvision import datasets

from visattn import data
from visattn.data import ArrayPictures
from visattn.data.labelled import arrays, published
from visattn.data.labelled.readers import Labelled, read
from visattn.data.scenes import CLASSES, VERSION, Scenes, store, write
from visattn.errors import DataError, ImageError, OptionError, OutputError, ResourceError

Pixels = NDArray[np.uint8]
FASHION = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no package of Debian."""
    monkeypatch.setenv("VISATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(published, "PACKAGE", tmp_path / "package")
    return tmp_path / "cache"


def noise(*shape: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def one_line(error: pytest.ExceptionInfo[DataError]) -> str:
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    return str(error.value)


# arrays


@pytest.mark.parametrize("shape", [(5, 4, 7), (5, 4, 7, 3)], ids=["grey", "rgb"])
def test_an_arrays_pictures_are_its_pixels(shape: tuple[int, ...]) -> None:
    pixels = noise(*shape)
    pictures: Labelled = ArrayPictures(pixels, [0, 1, 2, 1, 0], ("a", "b", "c"), "mine")
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


def test_the_fingerprint_of_an_array_tells_every_pixel_label_and_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_ROWS", 2)
    pixels, labels, classes = noise(5, 3, 4), [0, 1, 1, 0, 1], ["a", "b"]
    found = {ArrayPictures(pixels, labels, classes).fingerprint()}
    for index in np.ndindex(pixels.shape):
        changed = pixels.copy()
        changed[index] ^= 1
        found.add(ArrayPictures(changed, labels, classes).fingerprint())
    for i in range(5):
        found.add(ArrayPictures(pixels, [label ^ (i == j) for j, label in enumerate(labels)], classes).fingerprint())
    found.add(ArrayPictures(pixels, labels, ["a", "c"]).fingerprint())
    found.add(ArrayPictures(pixels.reshape(5, 4, 3), labels, classes).fingerprint())
    assert len(found) == 1 + 60 + 5 + 2


def test_the_fingerprint_of_an_array_is_that_of_its_numbers_alone() -> None:
    pixels, labels = noise(4, 3, 5), [0, 1, 1, 0]
    whole = ArrayPictures(pixels, labels, "ab", "one").fingerprint()
    assert whole == ArrayPictures(np.asfortranarray(pixels), np.array(labels, np.uint8), ("a", "b"), "two").fingerprint()


@pytest.mark.parametrize(
    ("pixels", "labels", "classes", "message"),
    [
        (noise(2, 3, 4), [0, 2], "ab", r"mine: labels must lie from 0 to 1, got 2 for picture 1\. Correct it"),
        (noise(2, 3, 4), [-1, 1], "ab", r"labels must lie from 0 to 1, got -1 for picture 0\."),
        (noise(3, 3, 4), [0, 1], "ab", r"mine: must have one label a picture, got 3 pictures and 2 labels\."),
        (noise(0, 3, 4), [], "ab", r"mine: must hold two pictures or more, got none\. Add pictures\."),
        (noise(1, 3, 4), [0], "ab", r"mine: must hold two pictures or more, got 1\."),
        (noise(3, 3, 4), [1, 1, 1], "ab", r"must hold two classes or more, got 3 pictures of 'b' alone\. Add"),
        (noise(2, 3, 4), [0.0, 1.0], "ab", r"labels must be integers of shape \(N,\), got float64 \(2,\)\."),
        (noise(2, 3, 4), [[0], [1]], "ab", r"labels must be integers of shape \(N,\), got int64 \(2, 1\)\."),
        (noise(2, 3, 4) / 255, [0, 1], "ab", r"pixels must be uint8 of shape .*, got float64 \(2, 3, 4\)\. Scale them"),
        (noise(2, 3, 4, 5), [0, 1], "ab", r"pixels must be uint8 of shape .*, got uint8 \(2, 3, 4, 5\)\."),
        (noise(2, 3), [0, 1], "ab", r"pixels must be uint8 of shape .*, got uint8 \(2, 3\)\."),
        (noise(2, 0, 4), [0, 1], "ab", r"pixels must be uint8 of shape .*, got uint8 \(2, 0, 4\)\."),
    ],
)
def test_arrays_that_cannot_be_learned_from_are_refused(pixels: Pixels, labels: Any, classes: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        ArrayPictures(pixels, labels, classes, "mine")
    one_line(error)


def test_a_pickle_of_mapped_pictures_maps_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = noise(40, 16, 16, 3)
    np.save(tmp_path / "pixels.npy", pixels)
    monkeypatch.chdir(tmp_path)
    pictures = ArrayPictures(np.load("pixels.npy", mmap_mode="r"), np.arange(40) % 2, "ab")
    content = pickle.dumps(pictures)
    assert len(content) < pixels.nbytes / 10
    monkeypatch.chdir("/")
    copy = pickle.loads(content)
    assert isinstance(copy.pixels, np.memmap)
    assert not copy.pixels.flags.writeable
    assert (copy.pixels == pixels).all()
    assert copy.fingerprint() == pictures.fingerprint()


@pytest.mark.parametrize("part", [slice(10, 30), slice(None, None, 2)], ids=["slice", "step"])
def test_a_pickle_of_a_part_of_a_mapped_array_holds_that_part(tmp_path: Path, part: slice) -> None:
    pixels = noise(40, 3, 4)
    np.save(tmp_path / "pixels.npy", pixels)
    pictures = ArrayPictures(np.load(tmp_path / "pixels.npy", mmap_mode="r")[part], np.arange(20) % 2, "ab")
    assert (pickle.loads(pickle.dumps(pictures)).pixels == pixels[part]).all()


def test_a_pickle_keeps_what_was_written_over_a_mapped_array(tmp_path: Path) -> None:
    np.save(tmp_path / "pixels.npy", noise(4, 3, 4))
    pixels = np.load(tmp_path / "pixels.npy", mmap_mode="c")
    pixels[:] = 7
    assert (pickle.loads(pickle.dumps(ArrayPictures(pixels, [0, 1, 0, 1], "ab"))).pixels == 7).all()


# folders


def save(path: Path, size: tuple[int, int] = (6, 4), colour: tuple[int, int, int] = (10, 20, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size[::-1], colour).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, train and test."""
    for name in (
        "train/dog/b.png",
        "train/dog/a.PNG",
        "train/cat/deep/er/x.bmp",
        "train/cat/y.png",
        "test/cat/1.png",
        "test/dog/2.png",
    ):
        save(tmp_path / "pets" / name)
    return tmp_path / "pets"


def names(pictures: Labelled, folder: Path) -> list[str]:
    return [str(Path(pictures.name(i)).relative_to(folder)) for i in range(len(pictures))]


def test_a_folders_classes_are_its_folders(folder: Path) -> None:
    pictures = read(str(folder), "train")
    assert (pictures.classes, pictures.channels, pictures.size) == (("cat", "dog"), 3, None)
    assert names(pictures, folder / "train") == ["cat/y.png", "cat/deep/er/x.bmp", "dog/a.PNG", "dog/b.png"]
    assert [pictures[i][1] for i in range(4)] == [0, 0, 1, 1]
    picture = pictures[2][0]
    assert (picture.mode, picture.size, picture.getpixel((0, 0))) == ("RGB", (4, 6), (10, 20, 30))
    assert names(read(str(folder), "test"), folder) == ["test/cat/1.png", "test/dog/2.png"]


def test_folders_of_torchvision_are_read_alike(folder: Path) -> None:
    for number, split in enumerate(("train", "test")):
        for i in range(3):
            save(folder / split / "emu" / f"{i}.png", colour=(i, 2 * i, number))
    pictures, theirs = read(str(folder), "train"), datasets.ImageFolder(folder / "train")
    assert pictures.classes == tuple(theirs.classes)
    assert sorted((pictures.name(i), pictures[i][1]) for i in range(len(pictures))) == sorted(theirs.samples)


def test_val_stands_for_test_where_there_is_no_test(folder: Path) -> None:
    (folder / "test").rename(folder / "val")
    assert names(read(str(folder), "test"), folder) == ["val/cat/1.png", "val/dog/2.png"]
    save(folder / "test" / "cat" / "t.png")
    save(folder / "test" / "dog" / "t.png")
    assert names(read(str(folder), "test"), folder) == ["test/cat/t.png", "test/dog/t.png"]


def test_files_of_no_format_and_hidden_ones_are_left_out(folder: Path) -> None:
    before = read(str(folder), "train")
    for name in ("dog/notes.txt", "dog/.hidden.png", ".cache/c.png", "dog/.deep/d.png", "Thumbs.db", "cat/labels.csv", "cat/png"):
        (folder / "train" / name).parent.mkdir(exist_ok=True)
        (folder / "train" / name).write_bytes(b"not a picture")
    after = read(str(folder), "train")
    assert names(after, folder) == names(before, folder)
    assert after.classes == before.classes
    assert after.fingerprint() == before.fingerprint()


def test_the_order_is_that_of_names_on_any_file_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cat/deep/aa/z.png", "cat/b/q.png", "dog/c.png", "ant/a.png"):
        save(folder / "train" / name)
    save(folder / "test/ant/a.png")
    before, walk, iterdir = read(str(folder), "train"), os.walk, Path.iterdir

    def reversed_walk(*args: Any, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for place, folders, files in walk(*args, **options):
            folders.sort(reverse=True)
            yield place, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", reversed_walk)
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(iterdir(path), reverse=True)))
    after = read(str(folder), "train")
    assert names(after, folder) == names(before, folder)
    assert (after.classes, after.fingerprint()) == (("ant", "cat", "dog"), before.fingerprint())


def test_links_are_followed_but_not_in_circles(folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "elsewhere" / "e.png")
    (folder / "train/emu").symlink_to(tmp_path / "elsewhere")
    (folder / "test/emu").symlink_to(tmp_path / "elsewhere")
    (folder / "train/dog/again").symlink_to(folder / "train/dog")
    (folder / "train/dog/more").symlink_to(tmp_path / "elsewhere")
    (folder / "train/cat/link.png").symlink_to(folder / "train/dog/b.png")
    found = ["cat/link.png", "cat/y.png", "cat/deep/er/x.bmp", "dog/a.PNG", "dog/b.png", "dog/more/e.png", "emu/e.png"]
    assert names(read(str(folder), "train"), folder / "train") == found


@pytest.mark.parametrize("what", ["damaged", "missing"])
def test_a_bad_sample_is_refused_by_name_when_it_is_asked_for(folder: Path, what: str) -> None:
    path = folder / "train/dog/a.PNG"
    path.unlink()
    if what == "damaged":
        path.write_bytes(b"\x89PNG\r\n\x1a\n broken")
    else:
        path.symlink_to(folder / "nowhere.png")
    pictures = read(str(folder), "train")
    assert pictures[3][1] == 1
    assert pictures.fingerprint()
    with pytest.raises(ImageError, match=r"train/dog/a\.PNG: "):
        pictures[2]


def test_names_that_are_not_ascii_or_not_text_are_read_and_safe_to_print(folder: Path) -> None:
    shutil.copy(folder / "train/cat/y.png", folder / "train/cat/zäh\n.png")
    shutil.copy(folder / "train/cat/y.png", os.fsdecode(os.fsencode(folder) + b"/train/cat/z\xff.png"))
    pictures = read(str(folder), "train")
    assert [pictures.name(i).rpartition("/")[2] for i in range(3)] == ["y.png", r"zäh\n.png", r"z\udcff.png"]
    assert [pictures[i][0].size for i in range(3)] == [(4, 6)] * 3
    assert len(pictures.fingerprint()) == 64
    assert pickle.loads(pickle.dumps(pictures)).name(2) == pictures.name(2)


def test_the_fingerprint_of_a_folder_is_that_of_names_sizes_and_labels(folder: Path, tmp_path: Path) -> None:
    before = read(str(folder), "train").fingerprint()
    assert read(str(folder), "test").fingerprint() != before
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    assert read(str(moved), "train").fingerprint() == before
    picture = moved / "train/dog/b.png"
    found = {before}
    for change in ("longer", "renamed", "of another class", "gone"):
        if change == "longer":
            picture.write_bytes(picture.read_bytes() + b"\0")
        elif change == "gone":
            picture.unlink()
        else:
            picture = picture.rename(moved / "train" / ("dog/c.png" if change == "renamed" else "cat/c.png"))
        found.add(read(str(moved), "train").fingerprint())
    assert len(found) == 5


def empty_class(folder: Path) -> None:
    (folder / "train/dog/a.PNG").unlink()
    (folder / "train/dog/b.png").rename(folder / "train/dog/b.txt")


def one_class(folder: Path) -> None:
    shutil.rmtree(folder / "train/dog")
    shutil.rmtree(folder / "test/dog")


def one_picture(folder: Path) -> None:
    one_class(folder)
    (folder / "train/cat/y.png").unlink()


def other_classes(folder: Path) -> None:
    (folder / "test/dog").rename(folder / "test/wolf")
    for i in range(7):
        (folder / f"train/more{i}").mkdir()


def no_pictures(folder: Path) -> None:
    for path in (*folder.rglob("*.png"), *folder.rglob("*.PNG"), *folder.rglob("*.bmp")):
        path.unlink()


def no_class_folders(folder: Path) -> None:
    shutil.rmtree(folder / "train")
    save(folder / "train/a.png")


def empty_test(folder: Path) -> None:
    shutil.rmtree(folder / "test")
    (folder / "test").mkdir()


def no_train(folder: Path) -> None:
    (folder / "train").rename(folder / "training")


def no_test(folder: Path) -> None:
    shutil.rmtree(folder / "test")


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"PK")


@pytest.mark.parametrize(
    ("split", "spoil", "message"),
    [
        ("train", empty_class, r"pets/train: every class must have pictures, got none for dog\. Add some, or remove the class"),
        ("train", one_class, r"pets/train: must hold two classes or more, got 2 pictures of 'cat' alone\."),
        ("train", one_picture, r"pets/train: must hold two pictures or more, got 1\. Add pictures\."),
        (
            "train",
            other_classes,
            r"pets: train and test must have the same classes, got only in .*pets/train: dog, more0, more1, more2, more3 and 3 more; "
            r"only in .*pets/test: wolf\. Rename or remove",
        ),
        ("test", other_classes, r"pets: train and test must have the same classes, got only in .*dog.*; only in .*wolf"),
        ("train", no_pictures, r"pets/train: must hold two pictures or more, got none\."),
        ("test", no_pictures, r"pets/test: must hold two pictures or more, got none\."),
        (
            "train",
            no_class_folders,
            r"pets/train: must hold a folder of pictures for each class, got none\. Expected .*train/CLASS/",
        ),
        ("test", empty_test, r"pets/test: must hold a folder of pictures for each class, got none\."),
        ("train", no_train, r"must hold train/CLASS/picture\.png and test/.* got no folder train but test, training\. Move"),
        ("test", no_train, r"got no folder train but test, training\."),
        ("test", no_test, r"got no folder test but train\. Move the pictures of test there\."),
        (
            "train",
            shutil.rmtree,
            r"pets: no such folder\. Pass a folder that holds train/CLASS/picture\.png, or one of fashion-mnist, ",
        ),
        ("train", a_file, r"pets: must be a folder, got a file\. Unpack it"),
    ],
)
def test_folders_that_cannot_be_learned_from_are_refused(
    folder: Path, split: Literal["train", "test"], spoil: Callable[[Path], None], message: str
) -> None:
    read(str(folder), split)
    spoil(folder)
    with pytest.raises(DataError, match=message) as error:
        read(str(folder), split)
    one_line(error)


def test_a_folder_that_cannot_be_listed_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(DataError, match=r"pets/t.*: cannot be read \(permission denied\)\. Check its mode\.") as error:
        read(str(folder), "train")
    one_line(error)


def test_train_alone_can_be_read_without_test(folder: Path) -> None:
    shutil.rmtree(folder / "test")
    assert len(read(str(folder), "train")) == 4


def test_scenes_that_were_written_are_a_folder_of_pictures(tmp_path: Path) -> None:
    scenes = {split: Scenes(40, (48, 56), seed=seed) for split, seed in (("train", 1), ("test", 2))}
    for split, one in scenes.items():
        write(one, tmp_path / split)
    pictures = read(str(tmp_path), "train")
    assert pictures.classes == CLASSES
    found = {Path(pictures.name(i)).name: pictures[i] for i in range(40)}
    for i in range(40):
        picture, label = found[f"{i:05d}.png"]
        assert (np.asarray(picture) == scenes["train"].scene(i).image).all()
        assert label == scenes["train"].scene(i).label


def test_scenes_of_one_split_are_refused_with_what_to_do(tmp_path: Path) -> None:
    write(Scenes(2, (48, 48)), tmp_path / "drawn")
    with pytest.raises(
        DataError, match=r"drawn: must hold train and test, got scenes of one split\. Write two, into .*drawn/train"
    ) as error:
        read(str(tmp_path / "drawn"), "train")
    one_line(error)


# what is common to all


def test_a_count_is_a_random_part_whose_classes_are_even_and_that_grows(tmp_path: Path) -> None:
    pixels, labels = noise(6000, 28, 28), np.repeat(np.arange(10), 600)
    fashion(tmp_path / "fashion", "train", pixels, labels)
    chosen = partial(read, "fashion-mnist", "train", root=tmp_path / "fashion")
    part = chosen(count=1000)
    kept = [int(part.name(i).split()[-1]) for i in range(1000)]
    assert len(set(kept)) == len(part) == 1000
    assert all((np.asarray(part[i][0]) == pixels[kept[i]]).all() and part[i][1] == labels[kept[i]] for i in range(0, 1000, 50))
    assert all(70 <= count <= 130 for count in np.bincount(labels[kept]))  # 9 is the standard deviation of chance
    assert [chosen(count=100).name(i) for i in range(100)] == [part.name(i) for i in range(100)]
    assert chosen(count=100, seed=1).name(0) != part.name(0)
    assert (part.classes, part.channels, part.size) == (published.FASHION, 1, (28, 28))
    digests = {chosen(count=count, seed=seed).fingerprint() for count in (99, 100, None) for seed in (0, 1)}
    assert len(digests) == 5
    assert chosen(count=100).fingerprint() in digests


@pytest.mark.parametrize("count", [1, 0, -3])
@pytest.mark.parametrize("name", ["fashion-mnist", "scenes", "folder"])
def test_fewer_than_two_pictures_are_refused(name: str, count: int) -> None:
    with pytest.raises(DataError, match=rf"{name} train: count must be 2 or more, got {count}\.") as error:
        read(name, "train", count=count)
    one_line(error)


def test_more_than_there_are_are_refused(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"pets train: count must be at most the 4 pictures there are, got 5\. Lower it\."
    ) as error:
        read(str(folder), "train", count=5)
    one_line(error)


def test_a_misspelt_name_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"cifar-10: no such folder; did you mean 'cifar10'\? Pass a folder .*scenes-ground\."
    ) as error:
        read("cifar-10", "train")
    one_line(error)


def test_a_split_or_a_seed_that_cannot_be_is_refused() -> None:
    with pytest.raises(OptionError, match=r"unknown split 'val'\. Known: train, test\."):
        read("scenes", "val")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"seed must be a number from 0 to .*, got -1\."):
        read("scenes", "train", seed=-1)


def test_the_door_is_light() -> None:
    code = "import sys, visattn.data; print([m for m in ('torch', 'torchvision', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_scenes_are_there_after_the_package_alone_was_imported() -> None:
    code = "import visattn; print(len(visattn.data.scenes.CLASSES))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "6"


def test_the_doors_names_are_there() -> None:
    assert data.read is read
    assert {"ArrayPictures", "Labelled", "read"} <= set(data.__all__)
    assert all(hasattr(data, name) for name in data.__all__)
    with pytest.raises(AttributeError, match="no attribute 'reed'"):
        data.reed  # noqa: B018


# scenes


@pytest.mark.parametrize(("name", "watermark"), [("scenes", "none"), ("scenes-shortcut", "label"), ("scenes-conflict", "random")])
@pytest.mark.parametrize(("split", "seed"), [("train", 7), ("test", 8)])
def test_drawn_scenes_are_those_of_their_seed(name: str, watermark: Any, split: Literal["train", "test"], seed: int) -> None:
    pictures, scenes = read(name, split, count=12, size=(48, 56), seed=3), Scenes(12, (48, 56), seed=seed, watermark=watermark)
    assert (len(pictures), pictures.size, pictures.channels, pictures.classes) == (12, (48, 56), 3, CLASSES)
    assert pictures.name(5) == f"{name} {split} 5"
    for i in range(12):
        assert (np.asarray(pictures[i][0]) == scenes.scene(i).image).all()
        assert pictures[i][1] == scenes.scene(i).label


def test_grounds_are_those_of_the_scenes_without_their_objects() -> None:
    pictures, scenes = read("scenes-ground", "test", count=6, size=(48, 48)), Scenes(6, (48, 48), seed=2)
    for i in range(6):
        assert (np.asarray(pictures[i][0]) == scenes.scene(i).ground).all()
        assert pictures[i][1] == scenes.scene(i).label


def test_scenes_are_drawn_once_and_then_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    first = read("scenes", "train", count=12, size=(48, 48))
    monkeypatch.setattr(Scenes, "scene", None)
    again = read("scenes", "train", count=12, size=(48, 48))
    assert isinstance(again, ArrayPictures)
    assert isinstance(again.pixels, np.memmap)
    assert not again.pixels.flags.writeable
    assert (np.asarray(again[7][0]) == np.asarray(first[7][0])).all()
    assert again.fingerprint() == first.fingerprint()
    assert len(pickle.dumps(again)) < 2000


def test_fingerprints_of_scenes_tell_version_kind_seed_count_and_size(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    small = partial(read, "scenes", "train", count=12, size=(48, 48))
    made = [
        small(),
        small(count=13),
        small(size=(48, 49)),
        small(seed=1),
        read("scenes", "test", count=12, size=(48, 48)),
        read("scenes-shortcut", "train", count=12, size=(48, 48)),
    ]
    monkeypatch.setattr(store, "VERSION", VERSION + 1)
    made.append(small())
    assert len(list((cache / "scenes").iterdir())) == len(made)
    assert len({pictures.fingerprint() for pictures in made}) == len(made)


def test_processes_draw_what_one_alone_draws(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(store, "_PART", 7)
    alone = read("scenes", "train", count=24, size=(48, 48))
    pixels = np.array([np.asarray(alone[i][0]) for i in range(24)])
    shutil.rmtree(cache)
    asked = []

    def cores() -> int:
        asked.append(2)
        return 2

    monkeypatch.setattr(store, "_ALONE", 10)
    monkeypatch.setattr(store, "_cores", cores)
    many = read("scenes", "train", count=24, size=(48, 48))
    assert len(asked) == 2
    assert (np.array([np.asarray(many[i][0]) for i in range(24)]) == pixels).all()
    assert [many[i][1] for i in range(24)] == [alone[i][1] for i in range(24)]


def test_a_process_that_is_ended_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(store, "_ALONE", 10)
    monkeypatch.setattr(store, "_cores", lambda: 2)
    monkeypatch.setattr(Scenes, "scene", lambda scenes, index: os._exit(9))
    with pytest.raises(ResourceError, match="the processes that draw scenes ended early; free some memory"):
        read("scenes", "train", count=24, size=(48, 48))
    assert not list((cache / "scenes").iterdir())


def test_drawing_that_is_broken_off_leaves_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    draw = Scenes.scene

    def interrupted(scenes: Scenes, index: int) -> Any:
        if index == 5:
            raise KeyboardInterrupt
        return draw(scenes, index)

    monkeypatch.setattr(Scenes, "scene", interrupted)
    monkeypatch.setattr(store, "_PART", 2)
    with pytest.raises(KeyboardInterrupt):
        read("scenes", "train", count=12, size=(48, 48))
    assert not list((cache / "scenes").iterdir())


def test_who_comes_second_takes_what_the_first_has_drawn(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    draw = store._draw

    def overtaken(scenes: Scenes, folder: Path, *, ground: bool) -> None:
        draw(scenes, folder, ground=ground)
        draw(scenes, folder, ground=ground)

    monkeypatch.setattr(store, "_draw", overtaken)
    assert len(read("scenes", "train", count=12, size=(48, 48))) == 12
    assert len(list((cache / "scenes").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_refused(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(OutputError, match="is a file, not a folder"):
        read("scenes", "train", count=12, size=(48, 48))


@pytest.mark.parametrize("name", ["pixels.npy", "labels.npy"])
@pytest.mark.parametrize("length", [0, 5, 150])
def test_a_damaged_cache_is_refused_with_what_to_do(name: str, length: int, cache: Path) -> None:
    read("scenes", "train", count=12, size=(48, 48))
    (folder,) = (cache / "scenes").iterdir()
    (folder / name).write_bytes((folder / name).read_bytes()[:length])
    with pytest.raises(
        DataError, match=rf"{folder.name}: must hold 12 scenes, got damaged files\. Remove this folder\."
    ) as error:
        read("scenes", "train", count=12, size=(48, 48))
    one_line(error)


# Fashion-MNIST


def idx(array: NDArray[Any]) -> bytes:
    return (
        b"\0\0\x08"
        + bytes([array.ndim])
        + b"".join(struct.pack(">I", side) for side in array.shape)
        + array.astype(np.uint8).tobytes()
    )


def fashion(folder: Path, split: str, pixels: Pixels, labels: Any, *, packed: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(FASHION[split], (pixels, np.asarray(labels)), strict=True):
        content = idx(array)
        (folder / f"{name}{'.gz' if packed else ''}").write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("place", ["root", "root/FashionMNIST/raw", "package", "cache/FashionMNIST/raw"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_fashion_mnist_is_found_wherever_it_lies(
    tmp_path: Path, place: str, packed: bool, split: Literal["train", "test"]
) -> None:
    pixels, labels = noise(6, 28, 28), [3, 9, 0, 1, 1, 4]
    fashion(tmp_path / place, split, pixels, labels, packed=packed)
    pictures = read("fashion-mnist", split, root=tmp_path / "root")
    assert (len(pictures), pictures.size, pictures.channels, len(pictures.classes)) == (6, (28, 28), 1, 10)
    assert all((np.asarray(pictures[i][0]) == pixels[i]).all() and pictures[i][1] == labels[i] for i in range(6))
    assert pictures.name(4) == f"fashion-mnist {split} 4"


def test_a_root_goes_before_the_package(tmp_path: Path) -> None:
    for place, shade in (("root", 1), ("package", 2), ("cache/FashionMNIST/raw", 3)):
        fashion(tmp_path / place, "train", np.full((2, 28, 28), shade, np.uint8), [0, 1])
    assert np.asarray(read("fashion-mnist", "train", root=tmp_path / "root")[0][0]).max() == 1
    assert np.asarray(read("fashion-mnist", "train")[0][0]).max() == 2
    shutil.rmtree(tmp_path / "package")
    assert np.asarray(read("fashion-mnist", "train")[0][0]).max() == 3


def test_the_installed_fashion_mnist_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path("/usr/share/datasets/fashion-mnist")
    if not package.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    monkeypatch.setattr(published, "PACKAGE", package)
    pictures = read("fashion-mnist", "test")
    assert isinstance(pictures, ArrayPictures)
    assert pictures.classes == tuple(datasets.FashionMNIST.classes)
    assert np.bincount(pictures.labels).tolist() == [1000] * 10
    assert 0.286 < pictures.pixels.mean() / 255 < 0.288


GOOD = idx(noise(3, 28, 28))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"must be an idx file of bytes with 3 axes, got a file that starts with nothing\. Fetch it again\."),
        (b"<html>", "got a file that starts with 3c 68 74 6d"),
        (GOOD[:10], "got a file that starts with 00 00 08 03"),
        (b"\0\0\x0d" + GOOD[3:], "got a file that starts with 00 00 0d 03"),
        (idx(noise(3, 28)), "got a file that starts with 00 00 08 02"),
        (idx(noise(3, 28, 27)), r"must have the shape \(N, 28, 28\), got \(3, 28, 27\)\."),
        (GOOD[:4] + b"\xff" * 4 + GOOD[8:], r"must have the shape \(N, 28, 28\), got \(4294967295, 28, 28\)\."),
        (GOOD[:-1], r"must hold 2352 bytes of data, got 2351\. It is damaged"),
        (GOOD + b"\0", r"must hold 2352 bytes of data, got more\."),
    ],
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_damaged_idx_files_are_refused(tmp_path: Path, content: bytes, message: str, packed: bool) -> None:
    fashion(tmp_path, "train", noise(3, 28, 28), [0, 1, 2], packed=packed)
    path = tmp_path / f"{FASHION['train'][0]}{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=rf"{path.name}: {'' if message.startswith('must') else '.*'}{message}") as error:
        read("fashion-mnist", "train", root=tmp_path)
    one_line(error)


@pytest.mark.parametrize("how", ["cut", "flipped", "not gzip"])
def test_a_damaged_archive_is_refused(tmp_path: Path, how: str) -> None:
    fashion(tmp_path, "train", noise(3, 28, 28), [0, 1, 2])
    path = tmp_path / f"{FASHION['train'][0]}.gz"
    whole = path.read_bytes()
    flipped = whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:]  # in the checksum: the data alone look well
    path.write_bytes({"cut": whole[: len(whole) // 2], "flipped": flipped, "not gzip": GOOD}[how])
    with pytest.raises(DataError, match=rf"{path.name}: cannot be read \(.*\)\. Fetch it again\.") as error:
        read("fashion-mnist", "train", root=tmp_path)
    one_line(error)


def test_labels_of_other_pictures_are_refused(tmp_path: Path) -> None:
    fashion(tmp_path, "train", noise(3, 28, 28), [0, 1])
    with pytest.raises(DataError, match="fashion-mnist train: must have one label a picture, got 3 pictures and 2 labels"):
        read("fashion-mnist", "train", root=tmp_path)
    fashion(tmp_path, "train", noise(2, 28, 28), [0, 10])
    with pytest.raises(DataError, match="labels must lie from 0 to 9, got 10 for picture 1"):
        read("fashion-mnist", "train", root=tmp_path)


# the network


class Handler(SimpleHTTPRequestHandler):
    """Serves files; of names with `stall` it sends the first bytes and then nothing more, until the test is over."""

    over = threading.Event()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if "stall" not in self.path:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"begin")
        self.over.wait()
        return None


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A mirror of Fashion-MNIST, whose files lie in this folder."""
    folder = tmp_path / "server"
    for split in FASHION:
        fashion(folder, split, noise(4, 28, 28), [0, 1, 2, 3])
    Handler.over.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        files = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in sorted(folder.iterdir())]
        monkeypatch.setattr(datasets.FashionMNIST, "mirrors", [f"http://127.0.0.1:{running.server_address[1]}/"])
        monkeypatch.setattr(datasets.FashionMNIST, "resources", files)
        yield folder
        Handler.over.set()
        running.shutdown()
        thread.join()


def test_what_is_downloaded_lies_in_the_cache_as_torchvision_wants_it(server: Path, cache: Path) -> None:
    pictures = read("fashion-mnist", "train")
    assert (np.asarray(pictures[2][0]) == noise(4, 28, 28)[2]).all()
    assert [item.name for item in cache.iterdir()] == ["FashionMNIST"]
    shutil.rmtree(server)
    assert read("fashion-mnist", "train").fingerprint() == pictures.fingerprint()
    assert len(datasets.FashionMNIST(cache, train=False)) == len(read("fashion-mnist", "test")) == 4


def test_a_download_of_other_files_is_refused_and_leaves_nothing(server: Path, cache: Path) -> None:
    for path in server.iterdir():
        path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(
        DataError, match=r"fashion-mnist: not found in .*, and the download failed \(.*\); install it with"
    ) as error:
        read("fashion-mnist", "train")
    one_line(error)
    assert not list(cache.iterdir())


def test_a_download_that_stalls_ends(server: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "_SECONDS", 0.5)
    (server / "stall").write_bytes(b"")
    monkeypatch.setattr(datasets.FashionMNIST, "resources", [("stall", "0" * 32)])
    with pytest.raises(
        DataError,
        match=r"the download failed \(.*\); install it with: apt-get install dataset-fashion-mnist; or pass root \(--root\)",
    ):
        read("fashion-mnist", "train")
    assert not list(cache.iterdir())
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize("who", ["nobody listens", "nobody answers", "the name is not found"])
def test_a_server_that_does_not_answer_ends_in_a_message(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    monkeypatch.setattr(published, "_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if who == "nobody listens":
            silent.close()
        host = "server.invalid" if who == "the name is not found" else "127.0.0.1"
        monkeypatch.setattr(datasets.FashionMNIST, "mirrors", [f"http://{host}:{port}/"])
        with pytest.raises(
            DataError, match=rf"fashion-mnist: not found in .*, and {host}:{port} does not answer; install it with"
        ) as error:
            read("fashion-mnist", "train")
    one_line(error)


def test_a_look_up_of_a_name_that_hangs_ends_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(published, "_SECONDS", 0.1)

    def hang(*args: Any, **options: Any) -> list[Any]:
        over.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", ["http://server.invalid/"])
    try:
        with pytest.raises(DataError, match=r"server\.invalid does not answer"):
            read("fashion-mnist", "train")
    finally:
        over.set()


# CIFAR


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small files in the form of CIFAR-10 and CIFAR-100, taken for the published ones."""
    for kind, classes, field in ((datasets.CIFAR10, 10, "labels"), (datasets.CIFAR100, 100, "fine_labels")):
        place = tmp_path / "root" / kind.base_folder
        place.mkdir(parents=True)

        def pickled(name: str, content: Any, place: Path = place) -> list[str]:
            (place / name).write_bytes(pickle.dumps(content))
            return [name, hashlib.md5((place / name).read_bytes()).hexdigest()]

        parts = [pickled(f"part{i}", {"data": noise(4, 3072, seed=i), field: [0, 1, 2, classes - 1]}) for i in range(3)]
        meta = pickled("meta", {kind.meta["key"]: [f"class {i}" for i in range(classes)]})
        monkeypatch.setattr(kind, "train_list", parts[:2])
        monkeypatch.setattr(kind, "test_list", parts[2:])
        monkeypatch.setattr(kind, "meta", kind.meta | dict(zip(("filename", "md5"), meta, strict=True)))
        monkeypatch.setattr(kind, "url", "http://127.0.0.1:1/cifar.tar.gz")
    return tmp_path / "root"


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifars_planes_are_put_together(cifar: Path, name: str, classes: int) -> None:
    pictures = read(name, "train", root=cifar)
    assert (len(pictures), pictures.size, pictures.channels, len(pictures.classes)) == (8, (32, 32), 3, classes)
    rows = np.concatenate([noise(4, 3072, seed=i) for i in range(2)])
    for i in (0, 5):
        picture = pictures[i][0]
        for y, x in ((0, 0), (3, 17), (31, 30)):
            assert picture.getpixel((x, y)) == tuple(int(rows[i, 1024 * channel + 32 * y + x]) for channel in range(3))
    assert [pictures[i][1] for i in range(8)] == [0, 1, 2, classes - 1] * 2
    assert read(name, "test", root=cifar).name(3) == f"{name} test 3"


class Attack:
    """A pickle of it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["part0", "part2", "meta"])
def test_a_pickle_that_is_not_the_published_one_is_never_loaded(cifar: Path, tmp_path: Path, name: str) -> None:
    (cifar / datasets.CIFAR10.base_folder / name).write_bytes(pickle.dumps(Attack(tmp_path / "attacked")))
    with pytest.raises(DataError, match=rf"{name}: must have the md5 [0-9a-f]{{32}}, got another\. Fetch it again\.") as error:
        read("cifar10", "train", root=cifar)
    one_line(error)
    assert not (tmp_path / "attacked").exists()


def test_cifar_that_lacks_a_file_or_is_nowhere_is_refused(cifar: Path) -> None:
    (cifar / datasets.CIFAR10.base_folder / "meta").unlink()
    with pytest.raises(DataError, match=r"meta: must have the md5 .*, got no file\."):
        read("cifar10", "train", root=cifar)
    with pytest.raises(
        DataError, match=r"cifar100: cifar-100-python not found in .*, and 127\.0\.0\.1:1 does not answer; pass root \(--root\)"
    ):
        read("cifar100", "train")
