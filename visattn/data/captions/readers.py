"""Pictures with captions to learn from and to be scored on, by one name: scenes whose captions are their truth, or files of captions."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Protocol, get_args

import numpy as np
from PIL import Image

from visattn._support.checks import between, one_of, printable, suggest
from visattn._support.types import Split
from visattn.data.captions.files import INNER, find_captions, read_file
from visattn.data.captions.formats import unreadable
from visattn.data.captions.pictures import COUNTS, SCENES, CaptionedFiles, CaptionedScenes
from visattn.data.pictures import Pictures
from visattn.errors import DataError, VisattnWarning

FOLDERS = (  # in which published pictures lie, one in another too
    "images",
    "Images",
    "train2014",
    "val2014",
    "test2014",
    "train2017",
    "val2017",
    "Flicker8k_Dataset",
    "Flickr8k_Dataset",
    "flickr30k_images",
    "flickr30k-images",
)


class Captioned(Pictures, Protocol):
    """Pictures with captions, for training and testing."""

    def __getitem__(self, index: int) -> tuple[Image.Image, tuple[str, ...]]:
        """Picture and its captions, one or more; `ImageError`, which names the file, for one that cannot be used."""
        ...

    def captions(self, index: int) -> tuple[str, ...]:
        """The captions alone; the picture is not read."""
        ...


def read_captions(
    data: str,
    split: Split,
    *,
    root: Path | None = None,
    count: int | None = None,
    size: tuple[int, int] = (64, 64),
    seed: int = 0,
) -> Captioned:
    """Pictures with captions by name.

    Files are a JSONL of one's own (`{"image": "photos/1.jpg", "captions": ["a dog runs"], "split": "train"}`), Karpathy's
    `dataset_*.json`, COCO's `captions_*.json`, Flickr's `*.token.txt`, and tables that begin with `image,caption`. Where a file names no
    splits, a hash of a picture's name sends one in ten to test, whatever else is in the file; COCO's two files, in one folder, are train
    and test. Pictures and captions that are left out, and pictures that are missing, are told by a warning.

    Args:
        data: `scenes`: one to three things, none of a pair of color and shape in `NEW`; `scenes-new`: one of these at least in each;
            `scenes-any`: all pairs, and places that only the truth can tell. Else a file of captions, or a folder that holds one; what is
            called like scenes is `./NAME`.
        split: `train` or `test`.
        root: Where to look for pictures first; then it is the folder of the file, and in each of them the usual subfolders.
        count: How many pictures, drawn at random; all of a file unless told, and 20,000 and 1,000 scenes. A smaller count gives the first
            of a larger one.
        size: `(height, width)` of scenes; other pictures keep their own.
        seed: Of what `count` draws, and of scenes; 0 to 2**31 - 2.

    Returns:
        The pictures.

    Raises:
        OptionError: If an option is unknown or out of range.
        DataError: If there is no such data, or nothing can be learned from it; the message says what to do.
    """
    one_of(split, get_args(Split), "split")
    between(seed, 0, 2**31 - 2, "seed")
    if count is not None and count < 1:
        raise DataError(f"{printable(data)} {split}: count must be 1 or more, got {count}. Raise it.")
    if data in SCENES:
        return CaptionedScenes(data, split, COUNTS[split] if count is None else count, size, seed)
    try:
        place, whole = _file(data, split)
        folders = _folders(place, root)
    except OSError as error:
        refused = unreadable(Path(data), error)
        raise refused from error
    found = read_file(place, split, whole=whole)
    title, names = printable(data), list(found.pictures)
    if found.bare or found.blank:
        warnings.warn(
            f"{title} {split}: left out {found.bare} pictures without a caption and {found.blank} captions without a word.",
            VisattnWarning,
            stacklevel=2,
        )
    if count is not None:
        if count > len(names):
            raise DataError(f"{title} {split}: count must be at most the {len(names)} pictures there are, got {count}. Lower it.")
        names = [names[index] for index in np.random.RandomState(seed).permutation(len(names))[:count]]
    pictures = CaptionedFiles(names, [found.pictures[name] for name in names], folders, f"{title} {split}")
    if pictures.missing:
        warnings.warn(f"{title} {split}: {pictures.missing}", VisattnWarning, stacklevel=2)
    return pictures


def _file(data: str, split: Split) -> tuple[Path, bool]:
    """The file of captions, and whether all of it belongs to the split."""
    path = Path(data)
    if data and path.is_dir():
        return find_captions(path, split)
    if data and path.is_file():
        return path, False
    name = printable(data)
    if data and path.exists():
        raise DataError(f"{name}: must be a file of captions or a folder that holds one, got neither. Pass one of them.")
    near = suggest(data, tuple(SCENES), 1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise DataError(
        f"{name or 'data'}: no such file or folder{hint} Pass a file of captions, a folder that holds one, or one of {', '.join(SCENES)}."
    )


def _folders(file: Path, root: Path | None) -> list[Path]:
    """Where pictures may lie, the likeliest first."""
    if root is not None and not root.is_dir():
        raise DataError(
            f"{printable(str(root))}: root must be a folder, got {'a file' if root.exists() else 'nothing there'}. Correct it."
        )
    beside = [file.parent, *([file.parent.parent] if file.parent.name in INNER else [])]
    inner = dict.fromkeys(Path(*parts) for parts in product(("", *FOLDERS), repeat=2))
    return [place / part for place in ([root] if root else []) + beside for part in inner if (place / part).is_dir()]
