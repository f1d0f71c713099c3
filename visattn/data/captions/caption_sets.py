"""Load captioned images by name: generated scenes with exact captions, or caption files."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Protocol, get_args

import numpy as np
from PIL import Image

from visattn._support.checks import between, one_of, printable, suggest, unreadable
from visattn._support.notes import warn
from visattn._support.types import Split
from visattn.data.captions.caption_files import INNER, find_captions, read_file
from visattn.data.captions.captioned_images import COUNTS, SCENES, CaptionFileDataset, CaptionSceneDataset
from visattn.data.image_dataset import ImageDataset
from visattn.errors import DataError

FOLDERS = (  # image folders of published datasets; they may be nested
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


class CaptionDataset(ImageDataset, Protocol):
    """Captioned images, for training and testing."""

    def __getitem__(self, index: int) -> tuple[Image.Image, tuple[str, ...]]:
        """Return an image and its captions, one or more.

        Raises:
            ImageError: If the image cannot be read; the message names the file.
        """
        ...

    def captions(self, index: int) -> tuple[str, ...]:
        """Return the captions without loading the image."""
        ...


def load_captions(
    data: str,
    split: Split,
    *,
    root: Path | None = None,
    count: int | None = None,
    size: tuple[int, int] = (64, 64),
    seed: int = 0,
) -> CaptionDataset:
    """Load a dataset of captioned images by name.

    Supported caption files are JSONL of your own (`{"image": "photos/1.jpg", "captions": ["a dog runs"], "split": "train"}`), Karpathy's
    `dataset_*.json`, COCO's `captions_*.json`, Flickr's `*.token.txt`, and tables with the header `image,caption`. If a file names no
    splits, a hash of the image name assigns one image in ten to test, independent of the other images. COCO's two files in one folder are
    train and test. A warning reports images and captions that are left out, and images that are missing.

    Args:
        data: Name of generated scenes, a caption file, or a folder that holds one. `scenes` have one to three things and no pair of color
            and shape in `NEW`; each of `scenes-new` has at least one such pair. `scenes-any` have all pairs, and things so close to a
            border between thirds that their location is ambiguous. Write `./NAME` for a folder with the name of scenes.
        split: `train` or `test`.
        root: Folder to search for images first. The folder of the caption file comes next. Both are searched with the usual subfolders.
        count: Number of images, drawn at random. Default: all of a file; 20,000 scenes for train and 1,000 for test. A smaller count
            gives the first images of a larger one.
        size: `(height, width)` of scenes; other images keep their size.
        seed: Seed of the draw by `count` and of the scenes; 0 to 2**31 - 2.

    Returns:
        The dataset.

    Raises:
        OptionError: If an option is unknown or out of range.
        DataError: If the data does not exist or cannot be trained on; the message says what to do.
    """
    one_of(split, get_args(Split), "split")
    between(seed, 0, 2**31 - 2, "seed")
    if count is not None and count < 1:
        raise DataError(f"{printable(data)} {split}: count must be 1 or more, got {count}. Raise it.")
    if data in SCENES:
        return CaptionSceneDataset(data, split, COUNTS[split] if count is None else count, size, seed)
    try:
        place, whole = _file(data, split)
        folders = _folders(place, root)
    except OSError as error:
        raise DataError(unreadable(error, data)) from error
    found = read_file(place, split, whole=whole)
    title, names = printable(data), list(found.pictures)
    if found.bare or found.blank:
        warn(f"{title} {split}: left out {found.bare} images without a caption and {found.blank} captions without a word.")
    if count is not None:
        if count > len(names):
            raise DataError(f"{title} {split}: count must be at most {len(names)}, the number of images, got {count}. Lower it.")
        names = [names[index] for index in np.random.RandomState(seed).permutation(len(names))[:count]]
    pictures = CaptionFileDataset(names, [found.pictures[name] for name in names], folders, f"{title} {split}")
    if pictures.missing:
        warn(f"{title} {split}: {pictures.missing}")
    return pictures


def _file(data: str, split: Split) -> tuple[Path, bool]:
    """Return the caption file, and True if all of it belongs to the split."""
    path = Path(data)
    if data and path.is_dir():
        return find_captions(path, split)
    if data and path.is_file():
        return path, False
    name = printable(data)
    if data and path.exists():
        raise DataError(f"{name}: must be a caption file or a folder that holds one, got neither. Pass one of them.")
    near = suggest(data, tuple(SCENES), 1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise DataError(
        f"{name or 'data'}: no such file or folder{hint} Pass a caption file, a folder that holds one, or one of {', '.join(SCENES)}."
    )


def _folders(file: Path, root: Path | None) -> list[Path]:
    """Return the folders that may hold images, the likeliest first."""
    if root is not None and not root.is_dir():
        raise DataError(
            f"{printable(str(root))}: root must be a folder, got {'a file' if root.exists() else 'nothing there'}. Correct it."
        )
    beside = [file.parent, *([file.parent.parent] if file.parent.name in INNER else [])]
    inner = dict.fromkeys(Path(*parts) for parts in product(("", *FOLDERS), repeat=2))
    return [place / part for place in ([root] if root else []) + beside for part in inner if (place / part).is_dir()]
