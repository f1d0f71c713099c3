"""Pictures with captions by name: every format as it is published, and what cannot be learned from is refused in one line."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from visattn.data.captions.readers import Captioned, read_captions
from visattn.data.scenes import NEW, Scenes, store, write
from visattn.errors import DataError, ImageError, OptionError, VisattnWarning

Split = Literal["train", "test"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("VISATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def picture(path: Path, shade: int = 0) -> Path:
    """A small picture of one shade, which tells it from others; it is stored without loss."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (5, 4), (shade, shade, shade)).save(path, "PNG")
    return path


def lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def told(pictures: Captioned) -> dict[str, tuple[str, ...]]:
    """Captions by the names of files alone."""
    return {Path(pictures.name(i)).name: pictures.captions(i) for i in range(len(pictures))}


def shade(pictures: Captioned, index: int) -> int:
    return int(np.asarray(pictures[index][0])[0, 0, 0])


def refused(data: str | Path, message: str, split: Split = "train", **options: Any) -> None:
    """Refused in one line, whose end says what to do."""
    with pytest.raises(DataError, match=message) as error:
        read_captions(str(data), split, **options)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    assert re.search(r"[.?;] [A-Z][^.]*.*\.$", str(error.value)), str(error.value)


def in_test(name: str) -> bool:
    digits = hashlib.sha256(name.encode()).hexdigest()[:16]
    return int(digits, 16) % 10 == 0


def a_name(test: bool, before: str = "") -> str:
    """A name that the hash sends to test, or to train."""
    return next(name for number in range(1000) if in_test(name := f"{before}{number}.png") == test)


# the formats, as they are published


@pytest.fixture
def own(tmp_path: Path) -> Path:
    for number in range(4):
        picture(tmp_path / "photos" / f"{number}.png", number)
    return lines(
        tmp_path / "captions.jsonl",
        {"image": "photos/0.png", "captions": ["a dog", "A dog runs."], "split": "train"},
        {"image": "photos/1.png", "caption": "a cat", "split": "test", "licence": 3},
        {"image": "photos/2.png", "captions": ["a red star top left,  a blue disk\n centre "], "split": "train"},
        {"image": "photos/3.png", "captions": "one alone", "split": "train"},
    )


def test_lines_of_ones_own_are_read(own: Path) -> None:
    pictures = read_captions(str(own), "train")
    assert (len(pictures), pictures.channels, pictures.size) == (3, 3, None)
    assert [pictures.captions(i) for i in range(3)] == [
        ("a dog", "A dog runs."),
        ("a red star top left, a blue disk centre",),
        ("one alone",),
    ]
    assert [shade(pictures, i) for i in range(3)] == [0, 2, 3]
    image, captions = pictures[1]
    assert (image.mode, image.size, captions) == ("RGB", (5, 4), pictures.captions(1))
    assert pictures.name(2) == str(own.parent / "photos" / "3.png")
    assert told(read_captions(str(own), "test")) == {"1.png": ("a cat",)}


def test_a_folder_stands_for_the_file_in_it(own: Path) -> None:
    assert read_captions(str(own.parent), "train").fingerprint() == read_captions(str(own), "train").fingerprint()


def test_a_root_is_where_pictures_are_looked_for_first(own: Path, tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere" / "photos" / "0.png", 100)
    pictures = read_captions(str(own), "train", root=tmp_path / "elsewhere")
    assert [shade(pictures, i) for i in range(3)] == [100, 2, 3]


def test_written_scenes_have_captions(tmp_path: Path) -> None:
    scenes = Scenes(12, (48, 48), seed=5)
    write(scenes, tmp_path / "scenes")
    pictures = read_captions(str(tmp_path / "scenes"), "train")
    assert 0 < len(pictures) <= 12
    for index in range(len(pictures)):
        scene = scenes.scene(int(Path(pictures.name(index)).stem))
        assert (np.asarray(pictures[index][0]) == scene.image).all()
        assert pictures.captions(index) == (scene.caption,)


def karpathy(path: Path, *images: tuple[str, str, str]) -> Path:
    """`dataset_coco.json`: folder, name and split of each picture."""
    content = {
        "images": [
            {
                "filepath": folder,
                "sentids": [2 * n, 2 * n + 1],
                "filename": name,
                "imgid": n,
                "split": split,
                "sentences": [
                    {"tokens": ["first", "of", str(n)], "raw": f"First of {n}.", "imgid": n, "sentid": 2 * n},
                    {"tokens": ["second", "of", str(n)], "imgid": n, "sentid": 2 * n + 1},
                ],
                "cocoid": 100 + n,
            }
            for n, (folder, name, split) in enumerate(images)
        ],
        "dataset": "coco",
    }
    path.write_text(json.dumps(content))
    return path


def test_karpathys_coco_is_read_and_restval_is_train(tmp_path: Path) -> None:
    images = [
        ("train2014", "a.jpg", "train"),
        ("val2014", "b.jpg", "restval"),
        ("val2014", "c.jpg", "val"),
        ("val2014", "d.jpg", "test"),
    ]
    for number, (folder, name, _) in enumerate(images):
        picture(tmp_path / "root" / folder / name, number)
    file = karpathy(tmp_path / "dataset_coco.json", *images)
    train, test = (read_captions(str(file), split, root=tmp_path / "root") for split in ("train", "test"))
    assert told(train) == {"a.jpg": ("First of 0.", "second of 0"), "b.jpg": ("First of 1.", "second of 1")}
    assert told(test) == {"d.jpg": ("First of 3.", "second of 3")}
    assert shade(train, 1) == 1


def test_val_stands_for_test_where_there_is_no_test(tmp_path: Path) -> None:
    for name in "ab":
        picture(tmp_path / "images" / f"{name}.jpg")
    file = karpathy(tmp_path / "dataset_flickr8k.json", ("", "a.jpg", "train"), ("", "b.jpg", "val"))
    assert list(told(read_captions(str(file), "test"))) == ["b.jpg"]


def coco(path: Path, images: dict[int, str], annotations: list[tuple[int, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "info": {"year": 2017},
        "images": [
            {"license": 3, "file_name": name, "height": 4, "width": 5, "date_captured": "2013-11-14 16:28:13", "id": key}
            for key, name in images.items()
        ],
        "licenses": [],
        "annotations": [{"image_id": key, "id": 900 + n, "caption": text} for n, (key, text) in enumerate(annotations)],
    }
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def coco_root(tmp_path: Path) -> Path:
    root = tmp_path / "coco"
    for number, name in enumerate(("train2017/000000000009.jpg", "train2017/000000000025.jpg", "val2017/000000000139.jpg")):
        picture(root / name, number)
    coco(
        root / "annotations" / "captions_train2017.json",
        {25: "000000000025.jpg", 9: "000000000009.jpg"},
        [(9, "A bowl.\n"), (25, "A giraffe"), (9, "Food in trays")],
    )
    coco(root / "annotations" / "captions_val2017.json", {139: "000000000139.jpg"}, [(139, "A room")])
    (root / "annotations" / "instances_val2017.json").write_text("{}")
    return root


@pytest.mark.parametrize("inner", ["", "annotations"], ids=["root", "annotations"])
def test_cocos_two_files_are_train_and_test(coco_root: Path, inner: str) -> None:
    train, test = (read_captions(str(coco_root / inner), split) for split in ("train", "test"))
    assert told(train) == {"000000000025.jpg": ("A giraffe",), "000000000009.jpg": ("A bowl.", "Food in trays")}
    assert told(test) == {"000000000139.jpg": ("A room",)}
    assert (shade(train, 0), shade(train, 1), shade(test, 0)) == (1, 0, 2)


def test_one_file_of_coco_is_split_by_names(tmp_path: Path) -> None:
    names = [a_name(test) for test in (False, True)]
    for name in names:
        picture(tmp_path / "val2014" / name)
    file = coco(tmp_path / "annotations" / "captions_val2014.json", dict(enumerate(names)), [(0, "a"), (1, "b")])
    for data in (file, tmp_path, tmp_path / "annotations"):
        assert told(read_captions(str(data), "train")) == {names[0]: ("a",)}
        assert told(read_captions(str(data), "test")) == {names[1]: ("b",)}


def flickr(folder: Path) -> Path:
    """Flickr8k as it is published: two archives beside each other, lists of names, and lemmas."""
    text = folder / "Flickr8k_text"
    text.mkdir(parents=True)
    names = ["1000268201_693b08cb0e.jpg", "1001773457_577c3a7d70.jpg", "1002674143_1b742ab4b8.jpg"]
    (text / "Flickr8k.token.txt").write_text(
        "".join(f"{name}#{n}\tCaption {n} of {name[:7]} , a\t\ttab .\n" for name in names for n in range(2)), newline="\n"
    )
    (text / "Flickr8k.lemma.token.txt").write_text("")
    for (split, listed), number in zip({"train": names[0], "dev": names[1], "test": names[2]}.items(), range(3), strict=True):
        (text / f"Flickr_8k.{split}Images.txt").write_text(f"{listed}\n")
        picture(folder / "Flicker8k_Dataset" / listed, number)
    return folder


def test_flickr8k_is_split_by_its_lists(tmp_path: Path) -> None:
    folder = flickr(tmp_path / "flickr8k")
    train, test = (read_captions(str(folder), split) for split in ("train", "test"))
    assert told(train) == {
        "1000268201_693b08cb0e.jpg": ("Caption 0 of 1000268 , a tab .", "Caption 1 of 1000268 , a tab ."),
    }
    assert list(told(test)) == ["1002674143_1b742ab4b8.jpg"]
    assert (shade(train, 0), shade(test, 0)) == (0, 2)
    file = folder / "Flickr8k_text" / "Flickr8k.token.txt"
    assert read_captions(str(file), "test").fingerprint() == test.fingerprint()


def test_flickr30k_has_no_lists(tmp_path: Path) -> None:
    names = [a_name(test) for test in (False, True)]
    for name in names:
        picture(tmp_path / "flickr30k-images" / name)
    (tmp_path / "results_20130124.token").write_text("".join(f"{name}#0\tTwo men .\n" for name in names))
    assert told(read_captions(str(tmp_path), "train")) == {names[0]: ("Two men .",)}
    assert told(read_captions(str(tmp_path), "test")) == {names[1]: ("Two men .",)}


def test_kaggles_table_is_read(tmp_path: Path) -> None:
    name = a_name(False)
    picture(tmp_path / "Images" / name)
    (tmp_path / "captions.txt").write_text(
        f'image,caption\n{name},A child in a pink dress .\n{name},"A girl , going ""in"" ."\n{name},over\n{name},"two\nlines"\n'
    )
    assert told(read_captions(str(tmp_path), "train")) == {
        name: ("A child in a pink dress .", 'A girl , going "in" .', "over", "two lines")
    }


@pytest.mark.parametrize("how", ["mark", "windows", "both"])
@pytest.mark.parametrize("form", ["jsonl", "json", "token", "csv"])
def test_byte_order_marks_and_line_breaks_of_windows_change_nothing(tmp_path: Path, form: str, how: str) -> None:
    name = a_name(False)
    picture(tmp_path / name)
    text, ending = {
        "jsonl": (json.dumps({"image": name, "caption": "Grüße, a dog"}) + "\n\n", "jsonl"),
        "json": (json.dumps({"images": [{"filename": name, "sentences": [{"raw": "Grüße, a dog"}]}]}, indent=1), "json"),
        "token": (f"{name}#0\tGrüße, a dog\n\n", "token.txt"),
        "csv": (f'image,caption\n{name},"Grüße, a dog"\n\n', "txt"),
    }[form]
    written = text.encode() if how == "mark" else text.replace("\n", "\r\n").encode()
    (tmp_path / f"mine.{ending}").write_bytes((b"" if how == "windows" else b"\xef\xbb\xbf") + written)
    assert told(read_captions(str(tmp_path / f"mine.{ending}"), "train")) == {name: ("Grüße, a dog",)}


@pytest.mark.parametrize("between", ["\u2028", "\x85", "\x0b", "\x1c"])
def test_line_breaks_of_unicode_end_no_line(tmp_path: Path, between: str) -> None:
    name = a_name(False)
    picture(tmp_path / name)
    (tmp_path / "a.token").write_text(f"{name}#0\ta dog{between}runs\n", encoding="utf-8")
    assert told(read_captions(str(tmp_path / "a.token"), "train")) == {name: ("a dog runs",)}


@pytest.mark.parametrize(
    "caption", ["</script><img src=x onerror=alert(1)>", "Ignore all instructions; $(rm -rf ~)", "{0} %s \\n <end>"]
)
def test_a_caption_is_text_whatever_it_says(tmp_path: Path, caption: str) -> None:
    picture(tmp_path / "a.png")
    file = lines(tmp_path / "a.jsonl", {"image": "a.png", "caption": caption, "split": "train"})
    assert read_captions(str(file), "train").captions(0) == (caption,)


def test_a_picture_that_is_named_again_has_the_captions_of_both(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    file = lines(
        tmp_path / "a.jsonl",
        {"image": "a.png", "caption": "one", "split": "train"},
        {"image": "b.png", "caption": "other", "split": "train"},
        {"image": "./a.png", "captions": ["two", "one"], "split": "train"},
    )
    assert told(read_captions(str(file), "train")) == {"a.png": ("one", "two", "one"), "b.png": ("other",)}


def test_names_that_are_not_ascii_are_read_and_safe_to_print(tmp_path: Path) -> None:
    names = ["grün 图.png", "two\nlines\x1b[31m.png"]
    for number, name in enumerate(names):
        picture(tmp_path / name, number)
    file = lines(tmp_path / "a.jsonl", *({"image": name, "caption": "a", "split": "train"} for name in names))
    pictures = read_captions(str(file), "train")
    assert [shade(pictures, i) for i in range(2)] == [0, 1]
    assert [Path(pictures.name(i)).name for i in range(2)] == ["grün 图.png", r"two\nlines\x1b[31m.png"]


# splits, counts, fingerprints


@pytest.fixture
def many(tmp_path: Path) -> Path:
    for number in range(60):
        picture(tmp_path / "images" / f"{number}.png", number)
    return lines(tmp_path / "many.jsonl", *({"image": f"{n}.png", "caption": f"number {n}"} for n in range(60)))


def test_a_hash_of_the_name_parts_what_names_no_split(many: Path) -> None:
    train, test = (list(told(read_captions(str(many), split))) for split in ("train", "test"))
    assert train + test != sorted(train + test)
    assert sorted(train + test) == sorted(f"{n}.png" for n in range(60))
    assert test == [f"{n}.png" for n in range(60) if in_test(f"{n}.png")]
    assert 0 < len(test) < 20


def test_more_pictures_move_none_to_the_other_split(many: Path) -> None:
    before = told(read_captions(str(many), "test"))
    picture(many.parent / "images" / a_name(True, "new"))
    added = {"image": a_name(True, "new"), "caption": "new"}
    many.write_text(json.dumps(added) + "\n" + many.read_text())
    assert told(read_captions(str(many), "test")) == before | {added["image"]: ("new",)}


def test_one_name_in_ten_is_in_test() -> None:
    assert 900 < sum(in_test(f"{number}.jpg") for number in range(10_000)) < 1100


def test_a_count_draws_pictures_at_random_and_grows(many: Path) -> None:
    read = partial(read_captions, str(many), "train")
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
    refused(many, rf"train: count must be at most the {len(whole)} pictures there are, got 61\. Lower it\.", count=61)
    refused(many, r"train: count must be 1 or more, got 0\.", count=0)


def test_a_fingerprint_is_the_same_wherever_the_files_lie(own: Path, tmp_path: Path) -> None:
    first = read_captions(str(own), "train").fingerprint()
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert read_captions(str(own), "train").fingerprint() == first
    shutil.copytree(tmp_path / "photos", tmp_path / "moved" / "images" / "photos")
    moved = shutil.copy(own, tmp_path / "moved" / "other.jsonl")
    assert read_captions(str(moved), "train").fingerprint() == first


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
def test_a_fingerprint_tells_every_caption_and_name(own: Path, tmp_path: Path, old: str, new: str) -> None:
    shutil.copy(tmp_path / "photos" / "3.png", tmp_path / "photos" / "1b.png")
    first = read_captions(str(own), "train").fingerprint()
    assert old in own.read_text()
    own.write_text(own.read_text().replace(old, new))
    assert read_captions(str(own), "train").fingerprint() != first


def test_a_fingerprint_tells_the_size_of_pictures_the_split_and_the_order(own: Path, tmp_path: Path) -> None:
    found = {read_captions(str(own), "train", count=count).fingerprint() for count in (None, 2, 3)}
    found.add(read_captions(str(own), "test").fingerprint())
    with (tmp_path / "photos" / "0.png").open("ab") as stream:
        stream.write(b"\0")
    found.add(read_captions(str(own), "train").fingerprint())
    assert len(found) == 5


def test_workers_get_the_same_and_little(many: Path) -> None:
    pictures = read_captions(str(many), "train")
    content = pickle.dumps(pictures)
    again = pickle.loads(content)
    assert told(again) == told(pictures)
    assert again.fingerprint() == pictures.fingerprint()
    with pytest.raises(IndexError):
        pictures.captions(60)


# what is left out, missing or refused


def test_what_has_no_caption_is_left_out_and_told(tmp_path: Path) -> None:
    for name in "abc":
        picture(tmp_path / f"{name}.png")
    file = lines(
        tmp_path / "a.jsonl",
        {"image": "a.png", "captions": ["a dog", " \n", "..."], "split": "train"},
        {"image": "b.png", "captions": [], "split": "train"},
        {"image": "c.png", "captions": [""], "split": "train"},
        {"image": "d.png", "captions": [], "split": "test"},
    )
    with pytest.warns(VisattnWarning, match="a.jsonl train: left out 2 pictures without a caption and 3 captions without a word"):
        pictures = read_captions(str(file), "train")
    assert told(pictures) == {"a.png": ("a dog",)}


def test_missing_pictures_are_told_and_refused_by_name_when_they_are_asked_for(own: Path, tmp_path: Path) -> None:
    (tmp_path / "photos" / "2.png").unlink()
    with pytest.warns(VisattnWarning, match=rf"train: 1 of 3 pictures are missing: no photos/2\.png in {tmp_path}\."):
        pictures = read_captions(str(own), "train")
    assert pictures.captions(1) == ("a red star top left, a blue disk centre",)
    with pytest.raises(ImageError, match=r"2\.png: no such file"):
        pictures[1]
    picture(tmp_path / "photos" / "3.png").write_bytes(b"\x89PNG damaged")
    with pytest.raises(ImageError, match=r"3\.png: .*damaged"):
        pictures[2]
    assert shade(pictures, 0) == 0


def test_pictures_that_are_nowhere_are_refused_with_where_they_were_looked_for(own: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "photos")
    (tmp_path / "images" / "train2014").mkdir(parents=True)
    places = ", ".join(str(tmp_path / inner) for inner in ("", "images", "images/train2014"))
    refused(own, rf"must find the pictures, got none of 3: no photos/0\.png in {re.escape(places)}\. Pass as root \(--root\)")
    refused(own, "nowhere: root must be a folder, got nothing there", root=tmp_path / "nowhere")
    refused(own, "captions.jsonl: root must be a folder, got a file", root=own)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a/../../b.png", "..", "", ".", "a/..", "a\0.png"], ids=ascii
)
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    file = lines(tmp_path / "a.jsonl", {"image": name, "caption": "a"})
    refused(
        file, r"a\.jsonl, line 1: a picture must lie below the folder of pictures, got '.*'\. Name it relative to that folder"
    )
    images = [{"filename": name, "sentences": []}]
    (tmp_path / "b.json").write_text(json.dumps({"images": images}))
    refused(tmp_path / "b.json", r"b\.json, image 0: a picture must lie below")


def test_folders_of_karpathy_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    refused(
        karpathy(tmp_path / "dataset_a.json", ("../..", "passwd", "train")),
        r"image 0: a picture must lie below .* got '\.\./\.\./passwd'",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a\.jsonl: must hold captions, got none\. Add some\."),
        ("\n \n", r"a\.jsonl: must hold captions, got none\."),
        (
            '{"image": "a.png", "caption": "a"}\n{"image": ',
            r"a\.jsonl, line 2: must be JSON, got damage \(expecting value.*\)\. Write one",
        ),
        ("[" * 100_000, r"line 1: must be JSON, got damage \(.*recursion.*\)\."),
        ("1" * 5_000, r"line 1: must be JSON, got damage \(exceeds the limit"),
        ("5", r"line 1: must be an object with captions, got 5\."),
        ('{"image": "a.png", "text": "a"}', r"line 1: must have captions, got the keys image, text\."),
        ('{"caption": "a"}', r"line 1: must have image, got the keys caption\."),
        ("{}", r"line 1: must have captions, got no keys\."),
        ('{"image": 5, "caption": "a"}', r"line 1: a picture's name must be text, got 5\."),
        ('{"image": "a.png", "captions": ["a", 5]}', r"line 1: a caption must be text, got 5\."),
        ('{"image": "a.png", "captions": ["a", null]}', r"a caption must be text, got null\."),
        ('{"image": "a.png", "captions": [["a"]]}', r"a caption must be text, got a list\."),
        ('{"image": "a.png", "captions": {"a": 1}}', r"captions must be a list of texts, got an object\."),
        ('{"image": "a.png", "caption": null}', r"captions must be a list of texts, got null\."),
        ('{"image": "a.png", "caption": "a\\ud800"}', r"a caption must be text, got half a character, '\\ud800'\."),
        ('{"image": "a\\udcff", "caption": "a"}', r"a picture's name must be text, got half a character"),
        ('{"image": "a.png", "caption": "a", "split": "dev"}', r"split must be one of train, restval, val, test, got \"dev\"\."),
        ('{"image": "a.png", "caption": "a", "split": ["train"]}', r"split must be one of .*, got a list\."),
        (
            '{"image": "a.png", "caption": "a", "split": "train"}\n{"image": "./a.png", "caption": "b", "split": "test"}',
            r"line 2: a\.png must be in one split, got train and test\. Remove it from one\.",
        ),
        (
            '{"image": "a.png", "caption": "a", "split": "train"}\n{"image": "b.png", "caption": "b"}',
            r"a\.jsonl: must name a split for all pictures or for none, got none for b\.png\.",
        ),
        ('{"image": "a.png", "caption": "a", "split": "test"}', r"must have pictures for train, got splits test alone\."),
        (
            '{"image": "a.png", "caption": " ", "split": "train"}',
            r"must have captions of words for train, got none for its 1 pictures\.",
        ),
    ],
)
def test_lines_that_cannot_be_learned_from_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    refused(tmp_path / "a.jsonl", message)


def test_a_hash_that_leaves_a_split_empty_is_told(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"image": a_name(False), "caption": "a"})
    refused(file, r"must have pictures for test, got none of 1: a hash of the name sends one in ten to test\. Add", "test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"categories": [], "questions": []},
            r"must be JSONL .*; got the keys categories, questions\. Write it as one of these\.",
        ),
        ([{"image": "a.png"}], r"got a list\."),
        ({}, r"got no keys\."),
        ({"images": []}, r"must hold captions, got none\."),
        ({"images": {}}, r"images must be a list, got an object\."),
        ({"images": [5]}, r"image 0: must be an object with filename, got 5\."),
        ({"images": [{"id": 1, "file_name": "a"}]}, r"image 0: must have filename, got the keys id, file_name\."),
        ({"images": [{"filename": "a", "filepath": 5}]}, r"image 0: filepath must be text, got 5\."),
        ({"images": [{"filename": "a"}]}, r"image 0: must have sentences, got the keys filename\."),
        ({"images": [{"filename": "a", "sentences": ["b"]}]}, r"image 0: must be an object with raw, got \"b\"\."),
        ({"images": [{"filename": "a", "sentences": [{"raw": 5}]}]}, r"image 0: a caption must be text, got 5\."),
        ({"images": [{"filename": "a", "sentences": [{"tokens": [5]}]}]}, r"image 0: a token must be text, got 5\."),
        ({"images": [], "annotations": []}, r"must hold captions, got none\."),
        ({"images": [{"id": 1}], "annotations": []}, r"image 0: must have file_name, got the keys id\."),
        ({"images": [{"id": [], "file_name": "a"}], "annotations": []}, r"image 0: id must be a number or text, got a list\."),
        (
            {"images": [{"id": 1, "file_name": "a"}, {"id": 1, "file_name": "b"}], "annotations": []},
            r"image 1: ids must be unique, got 1 for another picture too\.",
        ),
        (
            {"images": [{"id": 1, "file_name": "a"}], "annotations": [{"image_id": 1, "bbox": []}]},
            r"annotation 0: must have caption, got the keys image_id, bbox\.",
        ),
        (
            {"images": [{"id": 1, "file_name": "a"}], "annotations": [{"image_id": 2, "caption": "a"}]},
            r"annotation 0: image_id must be that of a picture, got 2\.",
        ),
    ],
)
def test_json_that_is_damaged_or_something_else_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content))
    refused(tmp_path / "a.json", rf"a\.json.*{message}")


def test_json_that_ends_early_is_refused(tmp_path: Path) -> None:
    whole = karpathy(tmp_path / "a.json", ("", "a.png", "train")).read_text()
    (tmp_path / "a.json").write_text(whole[: len(whole) // 2])
    refused(
        tmp_path / "a.json",
        r"a\.json: must be JSON, got damage \(.*line 1 column.*\)\. Fetch it again; a file of one object a line",
    )
    (tmp_path / "a.json").write_text("")
    refused(tmp_path / "a.json", r"a\.json: must hold captions, got none\.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a\.txt: must hold captions, got none\."),
        ("a dog runs\n", r"a\.txt: must be JSONL .*; got a file that begins with \"a dog runs\"\. Write it as one of these\."),
        ("x" * 1000, r"begins with \"x{39}\.\.\.\. Write"),
        (
            "a.png#0\ta dog\nb.png\ta cat\n",
            r"a\.txt, line 2: must be a name, # and a number, a tab and a caption, got \"b\.png\\ta cat\"",
        ),
        ("a.png#0\ta dog\n\nb.png#1 a cat\n", r"a\.txt, line 3: must be a name, #"),
        ("#0\ta dog\n", r"a\.txt, line 1: must be a name, #"),
        ("/a.png#0\ta dog\n", r"a\.txt, line 1: a picture must lie below"),
        ("image,caption\n", r"a\.txt: must hold captions, got none\."),
        (
            "image,caption\na.png,a dog\n\na.png,a dog, runs\n",
            r"a\.txt, line 4: must be image,caption, got 3 columns\. Put a caption",
        ),
        ("image,caption\na.png\n", r"a\.txt, line 2: must be image,caption, got 1 columns\."),
        ('image,caption\na.png,"a dog\n', r"a\.txt, line 2: must be a row of a table, got damage \(unexpected end of data\)\."),
        ('image,caption\na.png,"a" dog\n', r"a\.txt, line 2: must be a row of a table, got damage \("),
        ("image,caption\n../a.png,a dog\n", r"a\.txt, line 2: a picture must lie below"),
    ],
)
def test_text_that_is_damaged_or_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    refused(tmp_path / "a.txt", message)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "mark"])
def test_bytes_that_are_not_utf_8_are_refused_with_their_line(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "a.token").write_bytes(mark + "a.png#0\ta dog ü\n".encode() + b"b.png#0\ta caf\xe9\n")
    refused(tmp_path / "a.token", r"a\.token, line 2: must be UTF-8, got the byte 0xe9\. Save the file as UTF-8\.")


def test_flickrs_lists_are_there_both_or_not_at_all_and_share_nothing(tmp_path: Path) -> None:
    text = flickr(tmp_path / "a") / "Flickr8k_text"
    train, test = (text / f"Flickr_8k.{split}Images.txt" for split in ("train", "test"))
    test.write_text(train.read_text())
    refused(tmp_path / "a", r"testImages\.txt: must not share a picture with train, got 1000268201_693b08cb0e\.jpg\.")
    test.unlink()
    refused(tmp_path / "a", r"must hold both Flickr_8k\.trainImages\.txt and .* or neither, got Flickr_8k\.trainImages\.txt\.")


def test_a_folder_must_hold_one_file_of_captions(own: Path, coco_root: Path, tmp_path: Path) -> None:
    refused(tmp_path / "photos", r"photos: must hold a file of captions, got none\. Expected one of \*\.jsonl, ")
    lines(tmp_path / "more.jsonl")
    (tmp_path / "._more.jsonl").write_bytes(b"\0")
    refused(tmp_path, r"must hold one file of captions, got captions\.jsonl, more\.jsonl\. Pass the one that is meant\.")
    (coco_root / "annotations" / "captions_val2017.json").rename(coco_root / "annotations" / "captions_val2014.json")
    refused(coco_root, r"must hold one file of captions, got captions_train2017\.json, captions_val2014\.json\.")


def test_what_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused("scenes-knew", r"scenes-knew: no such file or folder; did you mean 'scenes-new'\? Pass a file of captions")
    refused("x\0\ny", r"x\\x00\\ny: no such file or folder\. Pass a file")
    refused("", r"data: no such file or folder\. Pass a file of captions, a folder that holds one, or one of scenes, ")
    refused("x" * 5000, r"x: cannot be read \(file name too long\)\. Check its name")
    if sys.platform != "win32":
        refused("/dev/null", r"null: must be a file of captions or a folder that holds one, got neither\.")
    (tmp_path / "scenes").mkdir()
    refused("./scenes", r"scenes: must hold a file of captions, got none\.")


def test_a_file_that_may_not_be_read_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    refused(own, r"captions\.jsonl: cannot be read \(permission denied\)\. Check its name and mode\.")


def test_a_split_or_a_seed_that_cannot_be_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown split 'val'"):
        read_captions("scenes", "val")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="seed must be a number from 0"):
        read_captions("scenes", "train", seed=-1)


# scenes


def pairs(caption: str) -> list[tuple[str, str]]:
    """Colour and shape of each thing."""
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
def test_scenes_are_those_of_their_seed_with_their_captions(name: str, options: Any, split: Split, number: int) -> None:
    pictures = read_captions(name, split, count=6, size=(48, 56), seed=3)
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


def test_scenes_are_drawn_once_and_apart_from_those_with_labels(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    read: Callable[[], Captioned] = partial(read_captions, "scenes", "train", count=5, size=(48, 48))
    first = read()
    store.drawn("scenes", "train", 5, (48, 48))
    assert sorted(folder.name for folder in (cache / "scenes").iterdir()) == ["captions-scenes-1-48x48-1-5", "scenes-1-48x48-1-5"]
    monkeypatch.setattr(Scenes, "scene", None)
    again = pickle.loads(pickle.dumps(read()))
    assert len(pickle.dumps(again)) < 2000
    assert again.fingerprint() == first.fingerprint()
    assert (np.asarray(again[4][0]) == np.asarray(first[4][0])).all()
    assert again.captions(4) == first.captions(4)
    with pytest.raises(IndexError):
        again[5]


def test_scenes_drawn_in_parts_have_their_captions(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    read: Callable[[], Captioned] = partial(read_captions, "scenes", "train", count=7, size=(48, 48))
    whole = [read().captions(i) for i in range(7)]
    shutil.rmtree(cache)
    monkeypatch.setattr(store, "_PART", 2)
    assert [read().captions(i) for i in range(7)] == whole
    assert len({len(caption) for (caption,) in whole}) > 1


def test_fingerprints_of_scenes_tell_kind_split_seed_size_and_count() -> None:
    small = partial(read_captions, count=3, size=(48, 48))
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


def test_the_fingerprint_of_scenes_tells_their_captions(cache: Path) -> None:
    read: Callable[[], Captioned] = partial(read_captions, "scenes", "train", count=3, size=(48, 48))
    before = read().fingerprint()
    (file,) = cache.rglob("captions.npy")
    captions = np.load(file)
    captions[1] = captions[0]
    np.save(file, captions)
    assert read().fingerprint() != before


@pytest.mark.parametrize("name", ["pixels.npy", "captions.npy"])
def test_a_damaged_cache_is_refused(name: str, cache: Path) -> None:
    read_captions("scenes", "train", count=3, size=(48, 48))
    (file,) = cache.rglob(name)
    file.write_bytes(file.read_bytes()[:150])
    refused("scenes", r"captions-scenes-.*: must hold 3 scenes, got damaged files\. Remove this folder\.", count=3, size=(48, 48))


def test_a_size_or_a_count_that_cannot_be_is_refused() -> None:
    with pytest.raises(OptionError, match="scenes must be 1 or more"):
        read_captions("scenes", "train", size=(20, 20))
    refused("scenes", "scenes train: count must be 1 or more, got 0", count=0)
