"""Caption files: what is wrong with them is true, and what the message says to do works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.advice.packing import owner
from tests.data.captioned import a_name, lines, picture, told
from visattn.data.captions.caption_sets import load_captions
from visattn.errors import DataError

GOOD: dict[str, Any] = {"image": "a.png", "captions": ["a dog"], "split": "train"}
ANOTHER: dict[str, Any] = {"image": "b.png", "captions": ["a cat"], "split": "train"}
NAMED: dict[str, Any] = {"a.png": ("a dog",)}


def read(data: Path, split: Any = "train", **options: Any) -> dict[str, tuple[str, ...]]:
    return told(load_captions(str(data), split, **options))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VISATTN_CACHE", str(tmp_path / "cache"))
    for name in ("a.png", "b.png", "photos/a.png", a_name(True), a_name(False)):
        picture(tmp_path / name)
    return tmp_path


# the lines of a file, the message, the lines when the advice is followed, and what is then read
CAPTIONS: dict[str, tuple[list[dict[str, Any]], str, list[dict[str, Any]], dict[str, tuple[str, ...]]]] = {
    "only another split": (
        [GOOD | {"split": "test"}],
        r"got only the splits test\. Add some\.$",
        [GOOD, ANOTHER | {"split": "test"}],
        NAMED,
    ),
    "no captions": ([], r"must hold captions, got none\. Add some\.$", [GOOD], NAMED),
    "no words": ([GOOD | {"captions": ["..."]}], r"with words for train, got none for its 1 images\. Add some\.$", [GOOD], NAMED),
    "another split name": ([GOOD | {"split": "dev"}], r"split must be one of .*, got \"dev\"\. Correct it\.$", [GOOD], NAMED),
    "two splits": (
        [GOOD, GOOD | {"split": "test"}],
        r"a\.png must be in one split, got train and test\. Remove it from one of them\.$",
        [GOOD],
        NAMED,
    ),
    "a split and none": (
        [GOOD, {"image": "b.png", "captions": ["a cat"]}],
        r"must name a split for all images or for none, got none for b\.png\. Add it\.$",
        [GOOD, ANOTHER],
        NAMED | {"b.png": ("a cat",)},
    ),
    "captions that are no list": (
        [GOOD | {"captions": {"en": "a dog"}}],
        r"captions must be a list of strings, got an object\. Write them as \[\"a dog\"\]\.$",
        [GOOD],
        NAMED,
    ),
    "a caption that is no text": ([GOOD | {"captions": [5]}], r"a caption must be text, got 5\. Correct it\.$", [GOOD], NAMED),
}


@pytest.mark.parametrize("name", list(CAPTIONS))
def test_captions_are_corrected_as_the_message_says(name: str, folder: Path) -> None:
    wrong, message, better, expected = CAPTIONS[name]
    file = lines(folder / "c.jsonl", *wrong)
    with pytest.raises(DataError, match=message):
        read(file)
    assert read(lines(file, *better)) == expected


def test_images_are_added_or_given_a_split_where_the_hash_leaves_test_empty(folder: Path) -> None:
    one, other = {"image": a_name(False), "captions": ["a dog"]}, {"image": a_name(True), "captions": ["a cat"]}
    file = lines(folder / "c.jsonl", one)
    with pytest.raises(DataError, match=r"one in ten to test\. Add images, or write JSONL that names the split of each\.$"):
        read(file, "test")
    assert read(lines(file, one, other), "test") == {a_name(True): ("a cat",)}
    assert read(lines(file, one | {"split": "test"}), "test") == {a_name(False): ("a dog",)}


def test_an_image_is_named_relative_to_a_folder_that_is_passed_as_root(folder: Path) -> None:
    file = lines(folder / "lists" / "c.jsonl", GOOD | {"image": str(folder / "photos" / "a.png")})
    with pytest.raises(
        DataError, match=r"must lie inside the image folder, .* Name it relative .*, and pass the folder as root\.$"
    ):
        read(file)
    assert read(lines(file, GOOD), root=folder / "photos") == NAMED


def test_a_folder_gets_a_caption_file_and_one_of_several_is_passed(folder: Path) -> None:
    with pytest.raises(DataError, match=r"must hold a caption file, got none\. Expected one of \*\.jsonl"):
        read(folder)
    lines(folder / "c.jsonl", GOOD)
    assert read(folder) == NAMED
    lines(folder / "d.jsonl", ANOTHER)
    with pytest.raises(DataError, match=r"must hold one caption file, got c\.jsonl, d\.jsonl\. Pass one of these files\.$"):
        read(folder)
    assert read(folder / "d.jsonl") == {"b.png": ("a cat",)}


def test_other_formats_are_converted(folder: Path) -> None:
    (folder / "c.txt").write_text("a.png: a dog\n")
    (folder / "c.json").write_text('{"a.png": "a dog"}')
    for name in ("c.txt", "c.json"):
        with pytest.raises(DataError, match=r"must be JSONL .*; got .*\. Convert it to one of these, or correct its ending\.$"):
            read(folder / name)
    assert read(lines(folder / "c.jsonl", GOOD)) == NAMED
    (folder / "c.json").write_text(
        json.dumps({"images": [{"filename": "a.png", "sentences": [{"raw": "a dog"}], "split": "train"}]})
    )
    assert read(folder / "c.json") == NAMED
    (folder / "c.json").write_text(json.dumps({"images": [{"filename": "a.png", "sentences": [{}], "split": "train"}]}))
    with pytest.raises(DataError, match=r"image 0: a sentence must have raw or tokens\. Correct it\.$"):
        read(folder / "c.json")
    (folder / "c.json").write_text(
        json.dumps({"images": [{"filename": "a.png", "sentences": [{"raw": "a dog"}], "split": "train"}]})
    )
    assert read(folder / "c.json") == NAMED
    (folder / "c.txt").write_text(f"image,caption\n{a_name(False)},a dog\n")
    assert read(folder / "c.txt") == {a_name(False): ("a dog",)}
    (folder / "c.txt").write_text(f"{a_name(False)}#0\ta dog\n")
    assert read(folder / "c.txt") == {a_name(False): ("a dog",)}


@pytest.mark.usefixtures("ordinary_user")
def test_permissions_of_a_caption_file_are_corrected(public_folder: Path) -> None:
    with owner():
        file = lines(public_folder / "c.jsonl", GOOD)
        picture(public_folder / "a.png")
        file.chmod(0)
    with pytest.raises(
        DataError, match=r"c\.jsonl: cannot be read \(permission denied\)\. Check its permissions and those of its folder\.$"
    ):
        read(file)
    with owner():
        file.chmod(0o644)
    assert read(file) == NAMED


def test_flickrs_other_list_is_added_and_a_file_saved_as_utf_8(folder: Path) -> None:
    (folder / "f").mkdir()
    for name in ("a.png", "b.png"):
        picture(folder / "f" / name)
    token = folder / "f" / "Flickr8k.token.txt"
    token.write_bytes("a.png#0\ta dög\nb.png#0\ta cat\n".encode("latin-1"))
    (folder / "f" / "Flickr_8k.trainImages.txt").write_text("a.png\n")
    with pytest.raises(
        DataError, match=r"line 1: must be UTF-8, got the byte 0xf6\. Save the text as UTF-8, or pass another file\.$"
    ):
        read(token)
    token.write_text(token.read_text(encoding="latin-1"), encoding="utf-8")
    with pytest.raises(DataError, match=r"must hold both .* or neither, got Flickr_8k\.trainImages\.txt\. Add the other\.$"):
        read(token)
    (folder / "f" / "Flickr_8k.testImages.txt").write_text("b.png\n")
    assert (read(token), read(token, "test")) == ({"a.png": ("a dög",)}, {"b.png": ("a cat",)})


def test_a_caption_file_with_the_ending_of_another_format_is_renamed(folder: Path) -> None:
    karpathy = json.dumps({"images": [{"filename": "a.png", "sentences": [{"raw": "a dog"}], "split": "train"}]})
    for wrong, right, text in (
        ("c.json", "c.jsonl", json.dumps(GOOD)),
        ("c.txt", "c.jsonl", json.dumps(GOOD)),
        ("c.txt", "c.json", karpathy),
    ):
        (folder / wrong).write_text(text)
        with pytest.raises(
            DataError, match=r"\(\.jsonl\), .* \(\.json\), .*\. Convert it to one of these, or correct its ending\.$"
        ):
            read(folder / wrong)
        assert read((folder / wrong).rename(folder / right)) == NAMED


def test_a_header_of_a_table_may_be_quoted(folder: Path) -> None:
    (folder / "c.csv").write_text(f'"image","caption"\n"{a_name(False)}","a dog"\n')
    assert read(folder / "c.csv") == {a_name(False): ("a dog",)}


def test_the_ending_of_a_caption_file_in_a_folder_may_be_in_capital_letters(folder: Path) -> None:
    lines(folder / "c.JSONL", GOOD)
    assert read(folder) == NAMED
