"""Advice of messages about datasets that a user's function returns: followed literally, it works."""

from __future__ import annotations

from pathlib import Path

import pytest

from visattn.data import load_labeled
from visattn.data.labeled.own import OwnDataset
from visattn.errors import DataError

OWN = """
import numpy as np
from PIL import Image
class Own(list):
    def __init__(self, items, **more):
        super().__init__(items)
        vars(self).update(more)
    def __getitem__(self, index):
        picture, label = super().__getitem__(index)
        return picture, ({} if index == 33 else label)
class Endless(Own):
    def __len__(self):
        raise OSError("no disk")
class Changing(Own):
    def __getitem__(self, index):
        vars(self)["read"] = vars(self).get("read", 0) + 1
        picture, label = super().__getitem__(index)
        return picture, (label + (self.read > 40)) % 2
gray = np.zeros((4, 4), np.uint8)
made = lambda split: {}
"""
# what the function returns, the message, and what it returns after the advice
FUNCTIONS = {
    "no dataset": ("3", r"returns a int; return a dataset with __len__ and __getitem__", "Own([(gray, 0), (gray, 1)])"),
    "a label to correct": (
        "Own([(gray, 0), (gray, 2)], classes=['a', 'b'])",
        r"labels must lie from 0 to 1, got 2 for item 1\. Correct it, or name more",
        "Own([(gray, 0), (gray, 1)], classes=['a', 'b'])",
    ),
    "more classes": (
        "Own([(gray, 0), (gray, 2)], classes=['a', 'b'])",
        r"labels must lie from 0 to 1, got 2 for item 1\. Correct it, or name more",
        "Own([(gray, 0), (gray, 2)], classes=['a', 'b', 'c'])",
    ),
    "fractions": (
        "Own([(gray, 1.9), (gray, 2.1)])",
        r"got 1\.9 for item 0\. Return whole numbers\.$",
        "Own([(gray, 1), (gray, 2)])",
    ),
    "numbers as text": (
        "Own([(gray, '0'), (gray, '1')])",
        r"got the text '0' for item 0\. Return whole numbers\.$",
        "Own([(gray, 0), (gray, 1)])",
    ),
    "a class": ("Own", r"the function returns the class Own; return Own\(\.\.\.\)\.$", "Own([(gray, 0), (gray, 1)])"),
    "dictionaries": (
        "[dict(image=gray, label=0), dict(image=gray, label=1)]",
        r"an item must be a pair \(image, class index\), got a dict\. Return a pair\.$",
        "[(gray, 0), (gray, 1)]",
    ),
    "a length that fails": (
        "Endless([(gray, 0), (gray, 1)])",
        r"the length of the Endless cannot be read \(OSError: no disk\)\. Correct its __len__\.$",
        "Own([(gray, 0), (gray, 1)])",
    ),
    "words": (
        "Own([(gray, 'cat'), (gray, 'dog')])",
        r"labels must be class indices \(invalid literal .*'cat'\)\. Return whole numbers",
        "Own([(gray, 0), (gray, 1)], classes=['cat', 'dog'])",
    ),
    "a transform": (
        "Own([(gray.astype(np.float32) / 255, 0), (gray, 1)])",
        r"must be an image of PIL or a uint8 array .*, got float32 \(4, 4\)\. Return one of these, without",
        "Own([(gray, 0), (gray, 1)])",
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_returns_what_the_message_asks_for_is_read(name: str, tmp_path: Path) -> None:
    wrong, message, right = FUNCTIONS[name]
    file = tmp_path / "own.py"
    file.write_text(OWN.format("label", wrong))
    with pytest.raises(DataError, match=message):
        load_labeled(f"{file}:made", "train")
    file.write_text(OWN.format("label", right))
    assert len(load_labeled(f"{file}:made", "train")) == 2


@pytest.mark.parametrize("fix", ["make them agree", "leave the list out"])
def test_labels_beside_the_items_agree_or_are_left_out(fix: str, tmp_path: Path) -> None:
    file, listed = tmp_path / "own.py", "Own([(gray, i % 2) for i in range(60)]{})"
    beside = ", targets=[i % 2 for i in range(60)]"
    file.write_text(OWN.format("1 - label", listed.format(beside)))
    with pytest.raises(
        DataError, match=r"label of the item is 0, and 1 in .* list of labels\. Make them agree, or leave the list"
    ):
        load_labeled(f"{file}:made", "train")[33]
    agree = fix == "make them agree"
    file.write_text(OWN.format("label" if agree else "1 - label", listed.format(beside if agree else "")))
    assert load_labeled(f"{file}:made", "train")[33][1] == (1 if agree else 0)


def test_a_function_returns_other_items_for_the_test_split(tmp_path: Path) -> None:
    file, code = tmp_path / "own.py", "Own([({}, 0), (gray, 1)])"
    file.write_text(OWN.format("label", code.format("gray")))
    one, other = (OwnDataset(f"{file}:made", split) for split in ("train", "test"))
    with pytest.raises(
        DataError, match=r"made\(\) returns equal items for both splits, in all 2 that were compared\. Return others"
    ):
        one.check_apart(other)
    file.write_text(OWN.format("label", code.format("gray + (split == 'test') * np.uint8(9)")))
    one, other = (OwnDataset(f"{file}:made", split) for split in ("train", "test"))
    one.check_apart(other)


def test_labels_that_change_are_in_no_list(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN.format("label", "Changing([(gray, i % 2) for i in range(20)])"))
    data = load_labeled(f"{file}:made", "train")
    with pytest.raises(DataError, match=r"label of the item is 1, and was 0 when it was first read\. Return the same label each"):
        [data[index] for index in range(20)]
    file.write_text(OWN.format("label", "Own([(gray, i % 2) for i in range(20)])"))
    data = load_labeled(f"{file}:made", "train")
    assert [data[index][1] for index in range(20)] == [0, 1] * 10


def test_only_items_that_were_compared_are_called_equal(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN.format("label", "Own([(gray, i % 2) for i in range(60)])"))
    one, other = (OwnDataset(f"{file}:made", split) for split in ("train", "test"))
    with pytest.raises(DataError, match="equal items for both splits, in all 16 that were compared"):
        one.check_apart(other)
