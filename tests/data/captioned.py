"""Caption files that tests write."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from visattn.data.captions.caption_sets import CaptionDataset, load_captions
from visattn.errors import DataError

Split = Literal["train", "test"]


def picture(path: Path, shade: int = 0) -> Path:
    """Write a small image of a single shade, which identifies it, in a lossless format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (5, 4), (shade, shade, shade)).save(path, "PNG")
    return path


def lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def told(pictures: CaptionDataset) -> dict[str, tuple[str, ...]]:
    """Return the captions by file name, without folders."""
    return {Path(pictures.name(i)).name: pictures.captions(i) for i in range(len(pictures))}


def shade(pictures: CaptionDataset, index: int) -> int:
    return int(np.asarray(pictures[index][0])[0, 0, 0])


def refused(data: str | Path, message: str, split: Split = "train", **options: Any) -> None:
    """Check that loading raises an error of one line that ends with what to do."""
    with pytest.raises(DataError, match=message) as error:
        load_captions(str(data), split, **options)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    assert re.search(r"[.?;] [A-Z][^.]*.*\.$", str(error.value)), str(error.value)


def in_test(name: str) -> bool:
    digits = hashlib.sha256(name.encode()).hexdigest()[:16]
    return int(digits, 16) % 10 == 0


def a_name(test: bool, before: str = "") -> str:
    """Return a name that the hash assigns to test, or to train."""
    return next(name for number in range(1000) if in_test(name := f"{before}{number}.png") == test)


def karpathy(path: Path, *images: tuple[str, str, str]) -> Path:
    """`dataset_coco.json`: folder, name and split of each image."""
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


def flickr(folder: Path) -> Path:
    """Flickr8k as published: two archives side by side, lists of names, and lemmas."""
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
