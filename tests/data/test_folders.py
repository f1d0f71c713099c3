"""Folders of labeled images: classes, order, fingerprint, and folders that cannot be trained on."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from torchvision import datasets

from tests.data.making import one_line, save
from visattn.data.labeled.labeled_sets import LabeledDataset, load_labeled
from visattn.data.scenes import CLASSES, Scenes, write
from visattn.errors import DataError, ImageError, OptionError


def names(pictures: LabeledDataset, folder: Path) -> list[str]:
    return [str(Path(pictures.name(i)).relative_to(folder)) for i in range(len(pictures))]


def test_classes_are_the_subfolders(folder: Path) -> None:
    pictures = load_labeled(str(folder), "train")
    assert (pictures.classes, pictures.channels, pictures.size) == (("cat", "dog"), 3, (6, 4))
    assert names(pictures, folder / "train") == ["cat/y.png", "cat/deep/er/x.bmp", "dog/a.PNG", "dog/b.png"]
    assert [pictures[i][1] for i in range(4)] == [0, 0, 1, 1]
    picture = pictures[2][0]
    assert (picture.mode, picture.size, picture.getpixel((0, 0))) == ("RGB", (4, 6), (10, 20, 30))
    assert names(load_labeled(str(folder), "test"), folder) == ["test/cat/1.png", "test/dog/2.png"]


def test_folder_matches_torchvision_image_folder(folder: Path) -> None:
    for number, split in enumerate(("train", "test")):
        for i in range(3):
            save(folder / split / "emu" / f"{i}.png", color=(i, 2 * i, number))
    pictures, theirs = load_labeled(str(folder), "train"), datasets.ImageFolder(folder / "train")
    assert pictures.classes == tuple(theirs.classes)
    assert sorted((pictures.name(i), pictures[i][1]) for i in range(len(pictures))) == sorted(theirs.samples)


def test_val_is_used_if_test_is_missing(folder: Path) -> None:
    (folder / "test").rename(folder / "val")
    assert names(load_labeled(str(folder), "test"), folder) == ["val/cat/1.png", "val/dog/2.png"]
    save(folder / "test" / "cat" / "t.png")
    save(folder / "test" / "dog" / "t.png")
    assert names(load_labeled(str(folder), "test"), folder) == ["test/cat/t.png", "test/dog/t.png"]


def test_hidden_files_and_other_formats_are_ignored(folder: Path) -> None:
    before = load_labeled(str(folder), "train")
    for name in ("dog/notes.txt", "dog/.hidden.png", ".cache/c.png", "dog/.deep/d.png", "Thumbs.db", "cat/labels.csv", "cat/png"):
        (folder / "train" / name).parent.mkdir(exist_ok=True)
        (folder / "train" / name).write_bytes(b"not a picture")
    after = load_labeled(str(folder), "train")
    assert names(after, folder) == names(before, folder)
    assert after.classes == before.classes
    assert after.fingerprint() == before.fingerprint()


def test_samples_are_sorted_by_name_on_any_file_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cat/deep/aa/z.png", "cat/b/q.png", "dog/c.png", "ant/a.png"):
        save(folder / "train" / name)
    save(folder / "test/ant/a.png")
    before, walk, iterdir = load_labeled(str(folder), "train"), os.walk, Path.iterdir

    def reversed_walk(*args: Any, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for place, folders, files in walk(*args, **options):
            folders.sort(reverse=True)
            yield place, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", reversed_walk)
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(iterdir(path), reverse=True)))
    after = load_labeled(str(folder), "train")
    assert names(after, folder) == names(before, folder)
    assert (after.classes, after.fingerprint()) == (("ant", "cat", "dog"), before.fingerprint())


def test_links_are_followed_without_cycles(folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "elsewhere" / "e.png")
    (folder / "train/emu").symlink_to(tmp_path / "elsewhere")
    (folder / "test/emu").symlink_to(tmp_path / "elsewhere")
    (folder / "train/dog/again").symlink_to(folder / "train/dog")
    (folder / "train/dog/more").symlink_to(tmp_path / "elsewhere")
    (folder / "train/cat/link.png").symlink_to(folder / "train/dog/b.png")
    found = ["cat/link.png", "cat/y.png", "cat/deep/er/x.bmp", "dog/a.PNG", "dog/b.png", "dog/more/e.png", "emu/e.png"]
    assert names(load_labeled(str(folder), "train"), folder / "train") == found


@pytest.mark.parametrize("what", ["damaged", "missing"])
def test_bad_sample_raises_on_access_with_its_name(folder: Path, what: str) -> None:
    path = folder / "train/dog/a.PNG"
    path.unlink()
    if what == "damaged":
        path.write_bytes(b"\x89PNG\r\n\x1a\n broken")
    else:
        path.symlink_to(folder / "nowhere.png")
    pictures = load_labeled(str(folder), "train")
    assert pictures[3][1] == 1
    assert pictures.fingerprint()
    with pytest.raises(ImageError, match=r"train/dog/a\.PNG: "):
        pictures[2]


def test_non_ascii_and_undecodable_names_are_read_and_safe_to_print(folder: Path) -> None:
    shutil.copy(folder / "train/cat/y.png", folder / "train/cat/zäh\n.png")
    shutil.copy(folder / "train/cat/y.png", os.fsdecode(os.fsencode(folder) + b"/train/cat/z\xff.png"))
    pictures = load_labeled(str(folder), "train")
    assert [pictures.name(i).rpartition("/")[2] for i in range(3)] == ["y.png", r"zäh\n.png", r"z\udcff.png"]
    assert [pictures[i][0].size for i in range(3)] == [(4, 6)] * 3
    assert len(pictures.fingerprint()) == 64
    assert pickle.loads(pickle.dumps(pictures)).name(2) == pictures.name(2)


def test_folder_fingerprint_depends_on_names_sizes_and_labels(folder: Path, tmp_path: Path) -> None:
    before = load_labeled(str(folder), "train").fingerprint()
    assert load_labeled(str(folder), "test").fingerprint() != before
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    assert load_labeled(str(moved), "train").fingerprint() == before
    picture = moved / "train/dog/b.png"
    found = {before}
    for change in ("longer", "renamed", "of another class", "gone"):
        if change == "longer":
            picture.write_bytes(picture.read_bytes() + b"\0")
        elif change == "gone":
            picture.unlink()
        else:
            picture = picture.rename(moved / "train" / ("dog/c.png" if change == "renamed" else "cat/c.png"))
        found.add(load_labeled(str(moved), "train").fingerprint())
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
        (
            "train",
            empty_class,
            r"pets/train: every class must have images \(PNG, .*\), got none for dog\. Add some\.$",
        ),
        ("train", one_class, r"pets/train: must hold two classes or more, got 2 images of 'cat' only\."),
        ("train", one_picture, r"pets/train: must hold two images or more, got 1\. Add images\."),
        (
            "train",
            other_classes,
            r"pets: train and test must have the same classes, got only in .*pets/train: dog, more0, more1, more2, more3 and 3 more; "
            r"only in .*pets/test: wolf\. Add, rename or remove",
        ),
        ("test", other_classes, r"pets: train and test must have the same classes, got only in .*dog.*; only in .*wolf"),
        ("train", no_pictures, r"pets/train: every class must have images \(PNG, .*\), got none for cat, dog\. Add some\."),
        ("test", no_pictures, r"pets/test: every class must have images \(PNG, .*\), got none for cat, dog\. Add some\."),
        (
            "train",
            no_class_folders,
            r"pets/train: must hold a folder of images for each class, got none\. Expected .*train/CLASS/",
        ),
        ("test", empty_test, r"pets/test: must hold a folder of images for each class, got none\."),
        ("train", no_train, r"must hold train/CLASS/image\.png and test/.* got no folder train but test, training\. Move"),
        ("test", no_train, r"got no folder train but test, training\."),
        ("test", no_test, r"got no folder test but train\. Move the images of test there\."),
        (
            "train",
            shutil.rmtree,
            r"pets: no such folder\. Pass a folder that holds train/CLASS/image\.png, file\.py:factory, or one of fashion-mnist, ",
        ),
        ("train", a_file, r"pets: must be a folder, got a file\. If it is an archive, unpack it"),
    ],
)
def test_unusable_folders_are_refused(
    folder: Path, split: Literal["train", "test"], spoil: Callable[[Path], None], message: str
) -> None:
    load_labeled(str(folder), split)
    spoil(folder)
    with pytest.raises(DataError, match=message) as error:
        load_labeled(str(folder), split)
    one_line(error)


def test_a_folder_that_cannot_be_listed_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(
        DataError, match=r"pets/t.*: cannot be read \(permission denied\)\. Check its permissions and those of its folder\."
    ) as error:
        load_labeled(str(folder), "train")
    one_line(error)


def test_train_split_loads_without_a_test_split(folder: Path) -> None:
    shutil.rmtree(folder / "test")
    assert len(load_labeled(str(folder), "train")) == 4


def test_written_scenes_load_as_an_image_folder(tmp_path: Path) -> None:
    scenes = {split: Scenes(40, (48, 56), seed=seed) for split, seed in (("train", 1), ("test", 2))}
    for split, one in scenes.items():
        write(one, tmp_path / split)
    pictures = load_labeled(str(tmp_path), "train")
    assert pictures.classes == CLASSES
    found = {Path(pictures.name(i)).name: pictures[i] for i in range(40)}
    for i in range(40):
        picture, label = found[f"{i:05d}.png"]
        assert (np.asarray(picture) == scenes["train"].scene(i).image).all()
        assert label == scenes["train"].scene(i).label


def test_scenes_of_one_split_are_refused_with_a_fix(tmp_path: Path) -> None:
    write(Scenes(2, (48, 48)), tmp_path / "drawn")
    with pytest.raises(
        DataError, match=r"drawn: must hold train and test, got scenes of one split\. Write both splits, into .*drawn/train"
    ) as error:
        load_labeled(str(tmp_path / "drawn"), "train")
    one_line(error)


def flat(tmp_path: Path, counts: dict[str, int]) -> Path:
    """Write a folder of classes without splits."""
    for name, count in counts.items():
        for number in range(count):
            save(tmp_path / "flat" / name / f"{number:02}.png", (6 + number, 4))
    return tmp_path / "flat"


@pytest.mark.parametrize("share", [0.2, 0.5, 0.01, 0.9])
def test_flat_folder_is_split_within_each_class(tmp_path: Path, share: float) -> None:
    counts = {"a": 10, "b": 3, "c": 2}
    place = flat(tmp_path, counts)
    train, test = (load_labeled(str(place), split, held_out=share, seed=4) for split in ("train", "test"))
    every = {name for part in (train, test) for name in names(part, place)}
    assert len(train) + len(test) == len(every) == sum(counts.values())
    assert train.classes == test.classes == ("a", "b", "c")
    for label, (_, count) in enumerate(counts.items()):
        held = int((test.labels == label).sum())
        assert held == min(max(1, round(share * count)), count - 1)
    again = load_labeled(str(place), "test", held_out=share, seed=4)
    assert names(again, place) == names(test, place)
    assert again.fingerprint() == test.fingerprint()


def test_seed_chooses_the_held_out_images(tmp_path: Path) -> None:
    place = flat(tmp_path, {"a": 20, "b": 20})
    tests = [names(load_labeled(str(place), "test", held_out=0.2, seed=seed), place) for seed in range(3)]
    assert len({tuple(one) for one in tests}) == 3


def test_folder_that_cannot_be_split_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"holds test, train already, so there is nothing to split. Leave held_out \(split in a Config\) out"
    ):
        load_labeled(str(folder), "train", held_out=0.2)
    with pytest.raises(DataError, match="class b: must have two images or more to be split, got one"):
        load_labeled(str(flat(tmp_path, {"a": 3, "b": 1})), "train", held_out=0.2)
    with pytest.raises(
        DataError, match=r"got no folder train but a, b. .* pass held_out=0.2 \(split=0.2 in a Config\) if a, b are the classes"
    ):
        load_labeled(str(flat(tmp_path, {"a": 3, "b": 2})), "train")
    with pytest.raises(OptionError, match="scenes has a test split of its own"):
        load_labeled("scenes", "train", held_out=0.2)
