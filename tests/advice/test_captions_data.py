"""Advice of messages about files of captions: followed literally, it works."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import numpy as np
import pytest

from tests.advice.closing import Close, closed  # noqa: F401 - a fixture
from tests.data.captioned import a_name, flickr, lines, picture, told
from visattn.data.captions.caption_sets import load_captions
from visattn.errors import DataError

codecs.lookup("utf-8-sig")  # an ordinary user may not read the standard library of root

SPLIT = '{"image": "a.png", "caption": "a dog", "split": "train"}'
BOTH: dict[str, tuple[str, ...]] = {"a.png": ("a dog",), "b.png": ("a cat",)}

# file, wrong content, message, content after the advice, captions
CAPTIONS: dict[str, tuple[str, str, str, str, dict[str, tuple[str, ...]]]] = {
    "a list in a line": (
        "x.jsonl",
        json.dumps([{"image": name, "caption": text[0], "split": "train"} for name, text in BOTH.items()]),
        r"line 1: must be an object, got a list\. Write one object per line\.",
        "".join(json.dumps({"image": name, "caption": text[0], "split": "train"}) + "\n" for name, text in BOTH.items()),
        BOTH,
    ),
    "an object of several lines": (
        "x.jsonl",
        json.dumps({"image": "a.png", "caption": "a dog", "split": "train"}, indent=1),
        r"line 1: must be valid JSON, .*\. Write one object per line\.",
        SPLIT,
        {"a.png": ("a dog",)},
    ),
    "single quotes": (
        "x.jsonl",
        SPLIT.replace('"', "'"),
        r"line 1: must be valid JSON, got an error \(.*\)\. Correct it\.",
        SPLIT,
        {"a.png": ("a dog",)},
    ),
    "no number": (
        "x.jsonl",
        SPLIT.replace("}", ', "size": NaN}'),
        r"line 1: must be valid JSON, got NaN, .*\. Correct it\.",
        SPLIT,
        {"a.png": ("a dog",)},
    ),
    "a field to correct": (
        "x.json",
        json.dumps({"images": [{"filename": "a.png", "split": "train", "sentences": [{"raw": 5}]}]}),
        r"images\[0\]\.sentences\[0\]\.raw must be text, got a whole number\. Correct it\.",
        json.dumps({"images": [{"filename": "a.png", "split": "train", "sentences": [{"raw": "a dog"}]}]}),
        {"a.png": ("a dog",)},
    ),
    "a line to correct": (
        "x.jsonl",
        '{"image": "a.png", "text": "a dog", "split": "train"}',
        r"line 1: must have captions, got the keys image, text, split\. Correct it\.",
        SPLIT,
        {"a.png": ("a dog",)},
    ),
    "a Flickr line to correct": (
        "x.token",
        "A\ta dog\n",
        r"line 1: must be a name, # and a number, a tab and a caption, got .*\. Correct it\.",
        "A#0\ta dog\n",
        {"A": ("a dog",)},
    ),
    "a comma to quote": (
        "x.csv",
        "image,caption\nA,a dog, runs\n",
        r"line 2: must be image,caption, got 3 columns\. Quote captions that contain a comma\.",
        'image,caption\nA,"a dog, runs"\n',
        {"A": ("a dog, runs",)},
    ),
    "a caption to add": (
        "x.csv",
        "image,caption\nA\n",
        r"line 2: must be image,caption, got 1 column\. Add the caption\.",
        "image,caption\nA,a dog\n",
        {"A": ("a dog",)},
    ),
    "a quote to close": (
        "x.csv",
        'image,caption\nA,"a dog\n',
        r"line 2: must be a table row, got an error \(unexpected end of data\)\. Correct it\.",
        'image,caption\nA,"a dog"\n',
        {"A": ("a dog",)},
    ),
}


@pytest.mark.parametrize("name", CAPTIONS)
def test_a_caption_file_that_is_changed_as_the_message_says_is_read(name: str, tmp_path: Path) -> None:
    file, wrong, message, right, captions = CAPTIONS[name]
    known = a_name(False)  # the hash of this name belongs to train
    for one in ("a.png", "b.png", known):
        picture(tmp_path / one)
    (tmp_path / file).write_text(wrong.replace("A", known))
    with pytest.raises(DataError, match=message):
        load_captions(str(tmp_path / file), "train")
    (tmp_path / file).write_text(right.replace("A", known))
    assert told(load_captions(str(tmp_path / file), "train")) == {key.replace("A", known): text for key, text in captions.items()}


def test_lines_in_a_file_named_json_are_read_under_the_advised_name(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "x.json").write_text(f"{SPLIT}\n{SPLIT}\n")
    with pytest.raises(DataError, match=r"must be valid JSON, .*; if it has one object per line, name it \.jsonl\."):
        load_captions(str(tmp_path / "x.json"), "train")
    (tmp_path / "x.json").rename(tmp_path / "x.jsonl")
    assert told(load_captions(str(tmp_path / "x.jsonl"), "train")) == {"a.png": ("a dog", "a dog")}


@pytest.mark.parametrize("fix", ["correct", "add the image"])
def test_coco_ids_that_are_corrected_are_read(fix: str, tmp_path: Path) -> None:
    names = [a_name(False, part) for part in ("a", "b", "c")]
    for name in names:
        picture(tmp_path / name)
    file = tmp_path / "captions_x.json"

    def written(ids: list[int], notes: list[int]) -> str:
        images = [{"id": key, "file_name": name} for key, name in zip(ids, names, strict=False)]
        file.write_text(json.dumps({"images": images, "annotations": [{"image_id": key, "caption": "a"} for key in notes]}))
        return str(file)

    with pytest.raises(DataError, match=r"image 1: ids must be unique, got 1 for another image too\. Correct one of them"):
        load_captions(written([1, 1], [1]), "train")
    with pytest.raises(
        DataError, match=r"annotation 1: image_id must be the id of an image, got 3\. Correct it, or add the image"
    ):
        load_captions(written([1, 2], [1, 3]), "train")
    found = told(load_captions(written([1, 2], [1, 2]) if fix == "correct" else written([1, 2, 3], [1, 2, 3]), "train"))
    assert list(found) == (names[:2] if fix == "correct" else names)


def test_an_image_in_both_lists_of_flickr8k_is_removed(tmp_path: Path) -> None:
    text = flickr(tmp_path / "f") / "Flickr8k_text"
    train, test = (text / f"Flickr_8k.{split}Images.txt" for split in ("train", "test"))
    before = test.read_text()
    test.write_text(before + train.read_text())
    with pytest.raises(DataError, match=r"testImages\.txt: must not share an image with train, got 1000268201.*\. Remove it\."):
        load_captions(str(tmp_path / "f"), "train")
    test.write_text(before)
    assert [list(told(load_captions(str(tmp_path / "f"), split))) for split in ("train", "test")] == [
        ["1000268201_693b08cb0e.jpg"],
        ["1002674143_1b742ab4b8.jpg"],
    ]


def test_images_elsewhere_are_found_by_root(tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere" / "a.png", 7)
    file = lines(tmp_path / "own" / "x.jsonl", json.loads(SPLIT))
    with pytest.raises(DataError, match=r"none of 1: no a\.png in .*/own\. Pass the folder that holds a\.png as root\."):
        load_captions(str(file), "train")
    with pytest.raises(DataError, match=r"nowhere: root must be a folder, got nothing there\. Correct it"):
        load_captions(str(file), "train", root=tmp_path / "nowhere")
    found = load_captions(str(file), "train", root=tmp_path / "elsewhere")
    assert np.asarray(found[0][0]).max() == 7


def test_names_and_counts_of_captions_are_corrected(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    file = lines(tmp_path / "x.jsonl", json.loads(SPLIT))
    with pytest.raises(
        DataError, match=r"no such file or folder\. Pass a caption file, a folder that holds one, or one of scenes"
    ):
        load_captions(str(tmp_path / "gone"), "train")
    with pytest.raises(DataError, match=r"/dev/null: must be a caption file or a folder that holds one, got neither\. Pass one"):
        load_captions("/dev/null", "train")
    with pytest.raises(DataError, match=r"count must be 1 or more, got 0\. Raise it"):
        load_captions(str(file), "train", count=0)
    with pytest.raises(DataError, match=r"count must be at most 1, the number of images, got 2\. Lower it"):
        load_captions(str(file), "train", count=2)
    for data in (file, tmp_path):
        assert told(load_captions(str(data), "train", count=1)) == {"a.png": ("a dog",)}
    with pytest.raises(DataError, match=r"did you mean 'scenes-new'\?"):
        load_captions("scenes-knew", "train")
    assert len(load_captions("scenes-new", "train", count=2, size=(48, 48))) == 2


def test_a_list_of_objects_is_written_as_lines(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    record = json.loads(SPLIT)
    (tmp_path / "x.json").write_text(json.dumps([record], indent=1))
    with pytest.raises(DataError, match=r"must be an object, got a list\. Write one object per line, and name it \.jsonl\."):
        load_captions(str(tmp_path / "x.json"), "train")
    assert told(load_captions(str(lines(tmp_path / "x.jsonl", record)), "train")) == {"a.png": ("a dog",)}


def test_a_caption_may_be_quoted_after_a_space(tmp_path: Path) -> None:
    known = a_name(False)
    picture(tmp_path / known)
    (tmp_path / "x.csv").write_text(f'image,caption\n{known}, "a dog, runs"\n')
    assert told(load_captions(str(tmp_path / "x.csv"), "train")) == {known: ("a dog, runs",)}


def test_a_quote_that_is_not_closed_is_told_by_its_first_line(tmp_path: Path) -> None:
    rows = "".join(f"{number}.png,a cat\n" for number in range(50))
    (tmp_path / "x.csv").write_text(f'image,caption\na.png,"a dog\n{rows}')
    with pytest.raises(DataError, match="line 2: must be a table row"):
        load_captions(str(tmp_path / "x.csv"), "train")


def test_root_is_the_folder_that_names_begin_from(tmp_path: Path) -> None:
    picture(tmp_path / "photos" / "x.png")
    file = lines(tmp_path / "own" / "x.jsonl", {"image": "photos/x.png", "caption": "a", "split": "train"})
    with pytest.raises(DataError, match=r"Pass the folder that holds photos/x\.png as root\.$"):
        load_captions(str(file), "train")
    assert told(load_captions(str(file), "train", root=tmp_path)) == {"x.png": ("a",)}


def test_permissions_of_a_folder_of_images_are_checked(
    public_folder: Path,
    closed: Close,  # noqa: F811
) -> None:
    picture(public_folder / "photos" / "x.png", 7)
    file = lines(public_folder / "x.jsonl", {"image": "photos/x.png", "caption": "a", "split": "train"})
    reopen = closed(public_folder / "photos")
    with pytest.raises(
        DataError, match=r"photos/x\.png: cannot be read \(permission denied\)\. Check its permissions and those of"
    ):
        load_captions(str(file), "train")
    reopen()
    assert np.asarray(load_captions(str(file), "train")[0][0]).max() == 7
