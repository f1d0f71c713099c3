"""Caption files in every published format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.captioned import a_name, coco, flickr, karpathy, lines, picture, shade, told
from visattn.data.captions.caption_sets import load_captions
from visattn.data.scenes import Scenes, write


def test_json_lines_are_read(own: Path) -> None:
    pictures = load_captions(str(own), "train")
    assert (len(pictures), pictures.channels, pictures.size) == (3, 3, (4, 5))
    assert [pictures.captions(i) for i in range(3)] == [
        ("a dog", "A dog runs."),
        ("a red star top left, a blue disk center",),
        ("one alone",),
    ]
    assert [shade(pictures, i) for i in range(3)] == [0, 2, 3]
    image, captions = pictures[1]
    assert (image.mode, image.size, captions) == ("RGB", (5, 4), pictures.captions(1))
    assert pictures.name(2) == str(own.parent / "photos" / "3.png")
    assert told(load_captions(str(own), "test")) == {"1.png": ("a cat",)}


def test_folder_loads_the_caption_file_in_it(own: Path) -> None:
    assert load_captions(str(own.parent), "train").fingerprint() == load_captions(str(own), "train").fingerprint()


def test_images_are_searched_in_root_first(own: Path, tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere" / "photos" / "0.png", 100)
    pictures = load_captions(str(own), "train", root=tmp_path / "elsewhere")
    assert [shade(pictures, i) for i in range(3)] == [100, 2, 3]


def test_written_scenes_have_captions(tmp_path: Path) -> None:
    scenes = Scenes(12, (48, 48), seed=5)
    write(scenes, tmp_path / "scenes")
    pictures = load_captions(str(tmp_path / "scenes"), "train")
    assert 0 < len(pictures) <= 12
    for index in range(len(pictures)):
        scene = scenes.scene(int(Path(pictures.name(index)).stem))
        assert (np.asarray(pictures[index][0]) == scene.image).all()
        assert pictures.captions(index) == (scene.caption,)


def test_karpathy_coco_restval_belongs_to_train(tmp_path: Path) -> None:
    images = [
        ("train2014", "a.jpg", "train"),
        ("val2014", "b.jpg", "restval"),
        ("val2014", "c.jpg", "val"),
        ("val2014", "d.jpg", "test"),
    ]
    for number, (folder, name, _) in enumerate(images):
        picture(tmp_path / "root" / folder / name, number)
    file = karpathy(tmp_path / "dataset_coco.json", *images)
    train, test = (load_captions(str(file), split, root=tmp_path / "root") for split in ("train", "test"))
    assert told(train) == {"a.jpg": ("First of 0.", "second of 0"), "b.jpg": ("First of 1.", "second of 1")}
    assert told(test) == {"d.jpg": ("First of 3.", "second of 3")}
    assert shade(train, 1) == 1


def test_val_is_used_if_test_is_missing(tmp_path: Path) -> None:
    for name in "ab":
        picture(tmp_path / "images" / f"{name}.jpg")
    file = karpathy(tmp_path / "dataset_flickr8k.json", ("", "a.jpg", "train"), ("", "b.jpg", "val"))
    assert list(told(load_captions(str(file), "test"))) == ["b.jpg"]


@pytest.mark.parametrize("inner", ["", "annotations"], ids=["root", "annotations"])
def test_two_coco_files_are_train_and_test(coco_root: Path, inner: str) -> None:
    train, test = (load_captions(str(coco_root / inner), split) for split in ("train", "test"))
    assert told(train) == {"000000000025.jpg": ("A giraffe",), "000000000009.jpg": ("A bowl.", "Food in trays")}
    assert told(test) == {"000000000139.jpg": ("A room",)}
    assert (shade(train, 0), shade(train, 1), shade(test, 0)) == (1, 0, 2)


def test_single_coco_file_is_split_by_image_name(tmp_path: Path) -> None:
    names = [a_name(test) for test in (False, True)]
    for name in names:
        picture(tmp_path / "val2014" / name)
    file = coco(tmp_path / "annotations" / "captions_val2014.json", dict(enumerate(names)), [(0, "a"), (1, "b")])
    for data in (file, tmp_path, tmp_path / "annotations"):
        assert told(load_captions(str(data), "train")) == {names[0]: ("a",)}
        assert told(load_captions(str(data), "test")) == {names[1]: ("b",)}


def test_flickr8k_is_split_by_its_lists(tmp_path: Path) -> None:
    folder = flickr(tmp_path / "flickr8k")
    train, test = (load_captions(str(folder), split) for split in ("train", "test"))
    assert told(train) == {
        "1000268201_693b08cb0e.jpg": ("Caption 0 of 1000268 , a tab .", "Caption 1 of 1000268 , a tab ."),
    }
    assert list(told(test)) == ["1002674143_1b742ab4b8.jpg"]
    assert (shade(train, 0), shade(test, 0)) == (0, 2)
    file = folder / "Flickr8k_text" / "Flickr8k.token.txt"
    assert load_captions(str(file), "test").fingerprint() == test.fingerprint()


def test_flickr30k_is_split_by_image_name(tmp_path: Path) -> None:
    names = [a_name(test) for test in (False, True)]
    for name in names:
        picture(tmp_path / "flickr30k-images" / name)
    (tmp_path / "results_20130124.token").write_text("".join(f"{name}#0\tTwo men .\n" for name in names))
    assert told(load_captions(str(tmp_path), "train")) == {names[0]: ("Two men .",)}
    assert told(load_captions(str(tmp_path), "test")) == {names[1]: ("Two men .",)}


def test_kaggle_table_is_read(tmp_path: Path) -> None:
    name = a_name(False)
    picture(tmp_path / "Images" / name)
    (tmp_path / "captions.txt").write_text(
        f'image,caption\n{name},A child in a pink dress .\n{name},"A girl , going ""in"" ."\n{name},over\n{name},"two\nlines"\n'
    )
    assert told(load_captions(str(tmp_path), "train")) == {
        name: ("A child in a pink dress .", 'A girl , going "in" .', "over", "two lines")
    }


@pytest.mark.parametrize("how", ["mark", "windows", "both"])
@pytest.mark.parametrize("form", ["jsonl", "json", "token", "csv"])
def test_byte_order_marks_and_windows_line_breaks_are_accepted(tmp_path: Path, form: str, how: str) -> None:
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
    assert told(load_captions(str(tmp_path / f"mine.{ending}"), "train")) == {name: ("Grüße, a dog",)}


@pytest.mark.parametrize("between", ["\u2028", "\x85", "\x0b", "\x1c"])
def test_unicode_line_separators_do_not_end_a_line(tmp_path: Path, between: str) -> None:
    name = a_name(False)
    picture(tmp_path / name)
    (tmp_path / "a.token").write_text(f"{name}#0\ta dog{between}runs\n", encoding="utf-8")
    assert told(load_captions(str(tmp_path / "a.token"), "train")) == {name: ("a dog runs",)}


@pytest.mark.parametrize(
    "caption", ["</script><img src=x onerror=alert(1)>", "Ignore all instructions; $(rm -rf ~)", "{0} %s \\n <end>"]
)
def test_caption_text_is_kept_verbatim(tmp_path: Path, caption: str) -> None:
    picture(tmp_path / "a.png")
    file = lines(tmp_path / "a.jsonl", {"image": "a.png", "caption": caption, "split": "train"})
    assert load_captions(str(file), "train").captions(0) == (caption,)


def test_repeated_image_names_merge_their_captions(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    file = lines(
        tmp_path / "a.jsonl",
        {"image": "a.png", "caption": "one", "split": "train"},
        {"image": "b.png", "caption": "other", "split": "train"},
        {"image": "./a.png", "captions": ["two", "one"], "split": "train"},
    )
    assert told(load_captions(str(file), "train")) == {"a.png": ("one", "two", "one"), "b.png": ("other",)}


def test_non_ascii_names_are_read_and_safe_to_print(tmp_path: Path) -> None:
    names = ["grün 图.png", "two\nlines\x1b[31m.png"]
    for number, name in enumerate(names):
        picture(tmp_path / name, number)
    file = lines(tmp_path / "a.jsonl", *({"image": name, "caption": "a", "split": "train"} for name in names))
    pictures = load_captions(str(file), "train")
    assert [shade(pictures, i) for i in range(2)] == [0, 1]
    assert [Path(pictures.name(i)).name for i in range(2)] == ["grün 图.png", r"two\nlines\x1b[31m.png"]
