"""Own datasets by `file.py:factory`: what is read of them, what is refused, and training with workers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.small import content, different, recipe
from visattn.data import load_labeled
from visattn.errors import DataError, ImageError, OptionError
from visattn.training import Config, train

FILE = """
import numpy as np
from PIL import Image
from torch.utils.data import Dataset

class Noise(Dataset):
    classes = ["dark", "light"]
    def __init__(self, count, seed):
        random = np.random.default_rng(seed)
        self.targets = [number % 2 for number in range(count)]
        self.pixels = [random.integers(0, 100, (12, 14, 3), dtype=np.uint8) + np.uint8(100 * label) for label in self.targets]
    def __len__(self):
        return len(self.targets)
    def __getitem__(self, index):
        return Image.fromarray(self.pixels[index]), self.targets[index]

def noise(split):
    return Noise(13 if split == "train" else 5, split == "train")

def plain(split):
    data = noise(split)
    return [(np.asarray(picture.convert("L")), label) for picture, label in (data[i] for i in range(len(data)))]

def failing(split):
    raise KeyError("no disk")

def nothing(split):
    return 3

def items(items, **more):
    class Own(list):
        pass
    own = Own(items)
    vars(own).update(more)
    return own

gray = np.zeros((4, 4), np.uint8)
wrong_labels = lambda split: items([(gray, 0), (gray, 2)], classes=["a", "b"])
text_labels = lambda split: items([(gray, "cat"), (gray, "dog")])
one_class = lambda split: items([(gray, 0), (gray, 0)])
few_labels = lambda split: items([(gray, 0), (gray, 1)], targets=[0])
ratings = lambda split: items([(gray, 1.9), (gray, 2.1), (gray, 2.9)])
ratings_beside = lambda split: items([(gray, 1), (gray, 2)], targets=[1.5, 2.0])
empty = lambda split: items([])
empty_with_labels = lambda split: items([], targets=[])
counts_beside = lambda split: items([(gray, 0), (gray, 1)], targets=2, classes=2)
tables_beside = lambda split: items([(gray, 0), (gray, 1)], targets={"a": 1, "b": 0}, classes={"b": 1, "a": 0})
tensors = lambda split: items([(gray.astype(np.float32), 0), (gray, 1)])
no_pair = lambda split: items([gray, gray], targets=[0, 1])
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


def test_images_labels_and_classes_are_those_of_the_dataset(file: Path) -> None:
    data = load_labeled(f"{file}:noise", "train")
    assert (len(data), data.classes, data.channels, data.size) == (13, ("dark", "light"), 3, (12, 14))
    assert data.labels.tolist() == [number % 2 for number in range(13)]
    picture, label = data[4]
    assert (picture.mode, picture.size, label) == ("RGB", (14, 12), 0)
    assert data.name(4) == f"{file}:noise train 4"
    assert data.fingerprint() != load_labeled(f"{file}:noise", "test").fingerprint()
    gray = load_labeled(f"{file}:plain", "test")
    assert (len(gray), gray.classes, gray.channels) == (5, ("0", "1"), 1)
    again = pickle.loads(pickle.dumps(data))
    assert np.array_equal(np.asarray(again[3][0]), np.asarray(data[3][0]))
    assert again.fingerprint() == data.fingerprint()


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("failing", DataError, r"failing\(\) fails: KeyError: 'no disk'; it is called with split='train'"),
        ("nothing", DataError, "the function returns a int; return a dataset with __len__ and __getitem__"),
        ("nois", DataError, "the file has no function 'nois'; did you mean noise?"),
        ("wrong_labels", DataError, "labels must lie from 0 to 1, got 2 for item 1"),
        ("text_labels", DataError, "labels must be class indices"),
        ("one_class", DataError, "must hold two classes or more"),
        ("few_labels", DataError, "must have one label per item, got 2 items and 1 labels"),
        (
            "ratings",
            DataError,
            r"labels must be class indices, got 1.9 for item 0. Return whole numbers",
        ),
        ("ratings_beside", DataError, r"got 1.5 for item 0"),
        ("empty", DataError, "must hold two images or more, got none"),
        ("empty_with_labels", DataError, "must hold two images or more, got none"),
        ("tensors", DataError, r"must be an image of PIL or a uint8 array \(H, W\) or \(H, W, 3\), got float32 \(4, 4\)"),
        ("no_pair", ImageError, "cannot be read"),
    ],
)
def test_what_is_no_dataset_is_refused_in_one_line(file: Path, name: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        load_labeled(f"{file}:{name}", "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["counts_beside", "tables_beside"])
def test_attributes_that_list_nothing_are_not_read(file: Path, name: str) -> None:
    data = load_labeled(f"{file}:{name}", "train")
    assert data.labels.tolist() == [0, 1]
    assert data.classes == ("0", "1")


def test_items_that_cannot_be_read_are_left_to_the_training(tmp_path: Path) -> None:
    text = (
        FILE
        + """
class Broken(Noise):
    def __getitem__(self, index):
        if index == 0:
            raise OSError("gone")
        return super().__getitem__(index)

broken = lambda split: Broken(8, 0)
"""
    )
    (tmp_path / "own.py").write_text(text)
    data = load_labeled(f"{tmp_path / 'own.py'}:broken", "train")
    assert (data.channels, data.size) == (3, (12, 14))
    with pytest.raises(ImageError, match=r"broken train 0: cannot be read \(OSError: gone\)"):
        data[0]


def test_a_missing_file_and_a_second_split_are_refused(file: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.py:noise: no such file; pass path/to/file\.py:factory"):
        load_labeled("gone.py:noise", "train")
    with pytest.raises(OptionError, match="has a test split of its own"):
        load_labeled(f"{file}:noise", "train", held_out=0.2)
    with pytest.raises(OptionError, match="split applies to a folder"):
        Config(data=f"{file}:noise", split=0.2)


def test_training_does_not_depend_on_workers(file: Path, tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for workers in (0, 2):
        run = tmp_path / f"run{workers}"
        train(recipe(Path(f"{file}:noise"), workers=workers, augment="flip", validation=0.2), run)
        found.append(content(run))
    assert different(*found) == []
    assert "`own.py:noise`" in (tmp_path / "run0" / "README.md").read_text()
    assert str(tmp_path) not in (tmp_path / "run0" / "README.md").read_text()


OTHERWISE = (
    FILE
    + """
class Changed(Noise):
    def __getitem__(self, index):
        picture, label = super().__getitem__(index)
        return picture, 1 - label

class Late(Noise):
    def __getitem__(self, index):
        picture, label = super().__getitem__(index)
        return picture, 1 - label if index == 33 else label

changed = lambda split: Changed(13 if split == "train" else 5, split == "train")
late = lambda split: Late(60 if split == "train" else 5, split == "train")
same = lambda split: Noise(13, 0)
as_floats = lambda split: items([(picture, float(label)) for picture, label in (noise(split)[i] for i in range(5))])
"""
)


def test_the_label_of_an_item_is_its_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OTHERWISE)
    data = load_labeled(f"{file}:changed", "train")
    assert data.labels.tolist() == [1 - number % 2 for number in range(13)]
    assert [data[index][1] for index in range(13)] == data.labels.tolist()
    late = load_labeled(f"{file}:late", "train")
    with pytest.raises(DataError, match="late train 33: the label of the item is 0, and 1 in the dataset's list of labels"):
        late[33]
    assert load_labeled(f"{file}:as_floats", "train").labels.tolist() == [0, 1, 0, 1, 0]


def test_a_function_that_ignores_the_split_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OTHERWISE)
    with pytest.raises(
        DataError,
        match=r"same\(\) returns equal items for both splits, in all 13 that were compared. Return others for split='test'",
    ):
        train(recipe(Path(f"{file}:same")), tmp_path / "run")
    assert not (tmp_path / "run").exists()
