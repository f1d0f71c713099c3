"""Caption files that cannot be trained on raise an error of one line; images and captions left out are reported."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.captioned import a_name, flickr, karpathy, lines, picture, refused, shade, told
from visattn.data.captions.caption_sets import load_captions
from visattn.errors import ImageError, OptionError, VisattnWarning


def test_images_without_a_caption_are_skipped_with_a_warning(tmp_path: Path) -> None:
    for name in "abc":
        picture(tmp_path / f"{name}.png")
    file = lines(
        tmp_path / "a.jsonl",
        {"image": "a.png", "captions": ["a dog", " \n", "..."], "split": "train"},
        {"image": "b.png", "captions": [], "split": "train"},
        {"image": "c.png", "captions": [""], "split": "train"},
        {"image": "d.png", "captions": [], "split": "test"},
    )
    with pytest.warns(VisattnWarning, match="a.jsonl train: left out 2 images without a caption and 3 captions without a word"):
        pictures = load_captions(str(file), "train")
    assert told(pictures) == {"a.png": ("a dog",)}


def test_missing_images_warn_and_raise_on_access(own: Path, tmp_path: Path) -> None:
    (tmp_path / "photos" / "2.png").unlink()
    with pytest.warns(VisattnWarning, match=rf"train: 1 of 3 images are missing: no photos/2\.png in {tmp_path}\."):
        pictures = load_captions(str(own), "train")
    assert pictures.captions(1) == ("a red star top left, a blue disk center",)
    with pytest.raises(ImageError, match=r"2\.png: no such file"):
        pictures[1]
    picture(tmp_path / "photos" / "3.png").write_bytes(b"\x89PNG damaged")
    with pytest.raises(ImageError, match=r"3\.png: .*damaged"):
        pictures[2]
    assert shade(pictures, 0) == 0


def test_error_lists_the_searched_folders_if_no_image_is_found(own: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "photos")
    (tmp_path / "images" / "train2014").mkdir(parents=True)
    places = ", ".join(str(tmp_path / inner) for inner in ("", "images", "images/train2014"))
    refused(
        own,
        rf"must find the images, got none of 3: no photos/0\.png in {re.escape(places)}\. "
        r"Pass the folder that holds photos/0\.png as root\.$",
    )
    refused(own, "nowhere: root must be a folder, got nothing there", root=tmp_path / "nowhere")
    refused(own, "captions.jsonl: root must be a folder, got a file", root=own)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a/../../b.png", "..", "", ".", "a/..", "a\0.png"], ids=ascii
)
def test_image_names_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    file = lines(tmp_path / "a.jsonl", {"image": name, "caption": "a"})
    refused(file, r"a\.jsonl, line 1: an image must lie inside the image folder, got '.*'\. Name it relative to that folder")
    images = [{"filename": name, "sentences": []}]
    (tmp_path / "b.json").write_text(json.dumps({"images": images}))
    refused(tmp_path / "b.json", r"b\.json, image 0: an image must lie inside")


def test_karpathy_paths_outside_the_folder_are_refused(tmp_path: Path) -> None:
    refused(
        karpathy(tmp_path / "dataset_a.json", ("../..", "passwd", "train")),
        r"image 0: an image must lie inside .* got '\.\./\.\./passwd'",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a\.jsonl: must hold captions, got none\. Add some\."),
        ("\n \n", r"a\.jsonl: must hold captions, got none\."),
        (
            '{"image": "a.png", "caption": "a"}\n{"image": ',
            r"a\.jsonl, line 2: must be valid JSON, got an error \(expecting value.*\)\. Write one",
        ),
        ("[" * 100_000, r"line 1: must be an object, got a list\."),
        ('{"image": ' + "[" * 100_000, r"line 1: is nested too deeply\."),
        ("1" * 5_000, r"line 1: has a number that is too large\."),
        ("5", r"line 1: must be an object, got a whole number\."),
        ('{"image": "a.png", "text": "a"}', r"line 1: must have captions, got the keys image, text\."),
        ('{"caption": "a"}', r"line 1: must have image, got the keys caption\."),
        ("{}", r"line 1: must have captions, got no keys\."),
        ('{"image": 5, "caption": "a"}', r"line 1: an image name must be text, got 5\."),
        ('{"image": "a.png", "captions": ["a", 5]}', r"line 1: a caption must be text, got 5\."),
        ('{"image": "a.png", "captions": ["a", null]}', r"a caption must be text, got null\."),
        ('{"image": "a.png", "captions": [["a"]]}', r"a caption must be text, got a list\."),
        ('{"image": "a.png", "captions": {"a": 1}}', r"captions must be a list of strings, got an object\."),
        ('{"image": "a.png", "caption": null}', r"captions must be a list of strings, got null\."),
        ('{"image": "a.png", "caption": "a\\ud800"}', r"line 1: must be valid JSON, got NaN, infinity or half a character\."),
        ('{"image": "a\\udcff", "caption": "a"}', r"line 1: must be valid JSON, got NaN, infinity or half a character\."),
        ('{"image": "a.png", "caption": "a", "split": "dev"}', r"split must be one of train, restval, val, test, got \"dev\"\."),
        ('{"image": "a.png", "caption": "a", "split": ["train"]}', r"split must be one of .*, got a list\."),
        (
            '{"image": "a.png", "caption": "a", "split": "train"}\n{"image": "./a.png", "caption": "b", "split": "test"}',
            r"line 2: a\.png must be in one split, got train and test\. Remove it from one of them\.",
        ),
        (
            '{"image": "a.png", "caption": "a", "split": "train"}\n{"image": "b.png", "caption": "b"}',
            r"a\.jsonl: must name a split for all images or for none, got none for b\.png\.",
        ),
        ('{"image": "a.png", "caption": "a", "split": "test"}', r"must have images for train, got only the splits test\."),
        (
            '{"image": "a.png", "caption": " ", "split": "train"}',
            r"must have captions with words for train, got none for its 1 images\.",
        ),
    ],
)
def test_invalid_caption_lines_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    refused(tmp_path / "a.jsonl", message)


def test_empty_hash_split_is_refused(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"image": a_name(False), "caption": "a"})
    refused(file, r"must have images for test, got none of 1: a hash of the name assigns one in ten to test\. Add", "test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"categories": [], "questions": []},
            r"must be JSONL .*; got the keys categories, questions\. Convert it to one of these, or correct its ending\.",
        ),
        ([{"image": "a.png"}], r"got a list\."),
        ({}, r"got no keys\."),
        ({"images": []}, r"must hold captions, got none\."),
        ({"images": {}}, r"images must be a list, got an object\."),
        ({"images": [5]}, r"images\[0\] must be an object, got a whole number\."),
        ({"images": [{"id": 1, "file_name": "a"}]}, r"images\[0\]\.filename is missing\."),
        ({"images": [{"filename": "a", "filepath": 5}]}, r"images\[0\]\.filepath must be text, got a whole number\."),
        ({"images": [{"filename": "a"}]}, r"images\[0\]\.sentences is missing\."),
        ({"images": [{"filename": "a", "sentences": ["b"]}]}, r"images\[0\]\.sentences\[0\] must be an object, got text\."),
        (
            {"images": [{"filename": "a", "sentences": [{"raw": 5}]}]},
            r"images\[0\]\.sentences\[0\]\.raw must be text, got a whole number\.",
        ),
        (
            {"images": [{"filename": "a", "sentences": [{"tokens": [5]}]}]},
            r"images\[0\]\.sentences\[0\]\.tokens\[0\] must be text, got a whole number\.",
        ),
        ({"images": [], "annotations": []}, r"must hold captions, got none\."),
        ({"images": [{"id": 1}], "annotations": []}, r"images\[0\]\.file_name is missing\."),
        (
            {"images": [{"id": [], "file_name": "a"}], "annotations": []},
            r"images\[0\]\.id must be a whole number or text, got a list\.",
        ),
        (
            {"images": [{"id": 1, "file_name": "a"}, {"id": 1, "file_name": "b"}], "annotations": []},
            r"image 1: ids must be unique, got 1 for another image too\.",
        ),
        (
            {"images": [{"id": 1, "file_name": "a"}], "annotations": [{"image_id": 1, "bbox": []}]},
            r"annotations\[0\]\.caption is missing\.",
        ),
        (
            {"images": [{"id": 1, "file_name": "a"}], "annotations": [{"image_id": 2, "caption": "a"}]},
            r"annotation 0: image_id must be the id of an image, got 2\.",
        ),
    ],
)
def test_damaged_or_unrelated_json_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content))
    refused(tmp_path / "a.json", rf"a\.json.*{message}")


def test_truncated_json_is_refused(tmp_path: Path) -> None:
    whole = karpathy(tmp_path / "a.json", ("", "a.png", "train")).read_text()
    (tmp_path / "a.json").write_text(whole[: len(whole) // 2])
    refused(
        tmp_path / "a.json",
        r"a\.json: must be valid JSON, got an error \(.*line 1 column.*\)\. Download it again; if it has one object per line, name it",
    )
    (tmp_path / "a.json").write_text("")
    refused(tmp_path / "a.json", r"a\.json: must hold captions, got none\.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a\.txt: must hold captions, got none\."),
        (
            "a dog runs\n",
            r"a\.txt: must be JSONL .*; got a file that begins with \"a dog runs\"\. Convert it .*, or correct its ending\.",
        ),
        ("x" * 1000, r"begins with \"x{39}\.\.\.\. Convert"),
        (
            "a.png#0\ta dog\nb.png\ta cat\n",
            r"a\.txt, line 2: must be a name, # and a number, a tab and a caption, got \"b\.png\\ta cat\"",
        ),
        ("a.png#0\ta dog\n\nb.png#1 a cat\n", r"a\.txt, line 3: must be a name, #"),
        ("#0\ta dog\n", r"a\.txt, line 1: must be a name, #"),
        ("/a.png#0\ta dog\n", r"a\.txt, line 1: an image must lie inside"),
        ("image,caption\n", r"a\.txt: must hold captions, got none\."),
        (
            "image,caption\na.png,a dog\n\na.png,a dog, runs\n",
            r"a\.txt, line 4: must be image,caption, got 3 columns\. Quote captions",
        ),
        ("image,caption\na.png\n", r"a\.txt, line 2: must be image,caption, got 1 column\. Add the caption\."),
        ('image,caption\na.png,"a dog\n', r"a\.txt, line 2: must be a table row, got an error \(unexpected end of data\)\."),
        ('image,caption\na.png,"a" dog\n', r"a\.txt, line 2: must be a table row, got an error \("),
        ("image,caption\n../a.png,a dog\n", r"a\.txt, line 2: an image must lie inside"),
    ],
)
def test_damaged_or_unrelated_text_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    refused(tmp_path / "a.txt", message)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "mark"])
def test_bytes_that_are_not_utf_8_are_refused_with_their_line_number(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "a.token").write_bytes(mark + "a.png#0\ta dog ü\n".encode() + b"b.png#0\ta caf\xe9\n")
    refused(
        tmp_path / "a.token",
        r"a\.token, line 2: must be UTF-8, got the byte 0xe9\. Save the text as UTF-8, or pass another file\.",
    )


def test_flickr8k_needs_both_split_lists_without_shared_images(tmp_path: Path) -> None:
    text = flickr(tmp_path / "a") / "Flickr8k_text"
    train, test = (text / f"Flickr_8k.{split}Images.txt" for split in ("train", "test"))
    test.write_text(train.read_text())
    refused(tmp_path / "a", r"testImages\.txt: must not share an image with train, got 1000268201_693b08cb0e\.jpg\.")
    test.unlink()
    refused(tmp_path / "a", r"must hold both Flickr_8k\.trainImages\.txt and .* or neither, got Flickr_8k\.trainImages\.txt\.")


def test_a_folder_must_hold_one_file_of_captions(own: Path, coco_root: Path, tmp_path: Path) -> None:
    refused(tmp_path / "photos", r"photos: must hold a caption file, got none\. Expected one of \*\.jsonl, ")
    lines(tmp_path / "more.jsonl")
    (tmp_path / "._more.jsonl").write_bytes(b"\0")
    refused(tmp_path, r"must hold one caption file, got captions\.jsonl, more\.jsonl\. Pass one of these files\.")
    (coco_root / "annotations" / "captions_val2017.json").rename(coco_root / "annotations" / "captions_val2014.json")
    refused(coco_root, r"must hold one caption file, got captions_train2017\.json, captions_val2014\.json\.")


def test_missing_or_unusable_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused("scenes-knew", r"scenes-knew: no such file or folder; did you mean 'scenes-new'\? Pass a caption file")
    refused("x\0\ny", r"x\\x00\\ny: no such file or folder\. Pass a caption file")
    refused("", r"data: no such file or folder\. Pass a caption file, a folder that holds one, or one of scenes, ")
    refused("x" * 5000, r"x: cannot be read \(file name too long\)\. Check its path")
    if sys.platform != "win32":
        refused("/dev/null", r"null: must be a caption file or a folder that holds one, got neither\.")
    (tmp_path / "scenes").mkdir()
    refused("./scenes", r"scenes: must hold a caption file, got none\.")


def test_unreadable_file_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    refused(own, r"captions\.jsonl: cannot be read \(permission denied\)\. Check its permissions and those of its folder\.")


def test_invalid_split_or_seed_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown split 'val'"):
        load_captions("scenes", "val")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="seed must be a number from 0"):
        load_captions("scenes", "train", seed=-1)
