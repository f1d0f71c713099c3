"""Labeled pictures to train and test on, by one name: a folder, a published data set, or scenes whose truth is known."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol, get_args

import numpy as np
from PIL import Image

from visattn._support.checks import between, one_of, printable, suggest
from visattn._support.files import exists, is_folder
from visattn._support.types import Split
from visattn.data.labeled.arrays import ArrayPictures
from visattn.data.labeled.folders import FolderPictures
from visattn.data.labeled.published import cifar, fashion_mnist
from visattn.data.pictures import Pictures
from visattn.data.scenes.store import MARKS, drawn
from visattn.errors import DataError

__all__ = ["KNOWN", "ArrayPictures", "FolderPictures", "Labeled", "read"]

PUBLISHED = ("fashion-mnist", "cifar10", "cifar100")
KNOWN = (*PUBLISHED, *MARKS)


class Labeled(Pictures, Protocol):
    """Labeled pictures, for training and testing."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into them."""
        ...

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Picture and label; `ImageError`, which names the file, for one that cannot be used."""
        ...


def read(
    data: str,
    split: Split,
    *,
    root: Path | None = None,
    count: int | None = None,
    size: tuple[int, int] = (64, 64),
    seed: int = 0,
) -> Labeled:
    """Labeled pictures by name.

    Args:
        data: A name of `KNOWN`, else a folder that holds `train/CLASS/...` and `test/CLASS/...` (or `val`); a folder that is called like
            a known name is `./NAME`. In `scenes-shortcut` a watermark tells the label, in `scenes-conflict` it is drawn at random;
            `scenes-ground` has no object.
        split: `train` or `test`.
        root: Where to look first for files of Fashion-MNIST or CIFAR.
        count: How many, drawn at random without looking at labels, two or more; all unless told. A smaller count gives the first of a
            larger one.
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
    if count is not None and count < 2:
        raise DataError(f"{printable(data)} {split}: count must be 2 or more, got {count}. One picture cannot be learned from.")
    if data in MARKS:
        return drawn(data, split, count, size, seed)
    whole = _whole(data, split, root)
    return whole if count is None else _Chosen(whole, count, seed, f"{printable(data)} {split}")


def _whole(data: str, split: Split, root: Path | None) -> Labeled:
    if data == "fashion-mnist":
        return fashion_mnist(split, root)
    if data in KNOWN:
        return cifar(data, split, root)
    folder = Path(data)
    if not is_folder(folder):
        name = printable(data)
        if exists(folder):
            raise DataError(f"{name}: must be a folder, got a file. Unpack it, and pass the folder.")
        near = suggest(data, KNOWN, 1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise DataError(
            f"{name}: no such folder{hint} Pass a folder that holds train/CLASS/picture.png, or one of {', '.join(KNOWN)}."
        )
    return FolderPictures(folder, split)


class _Chosen:
    """Some pictures of others, in random order; see `Labeled`."""

    def __init__(self, whole: Labeled, count: int, seed: int, title: str) -> None:
        """Choose them by a permutation, whose stream numpy keeps for ever."""
        if count > len(whole):
            raise DataError(f"{title}: count must be at most the {len(whole)} pictures there are, got {count}. Lower it.")
        self.classes, self.channels, self.size = whole.classes, whole.channels, whole.size
        self._whole, self._indices = whole, np.random.RandomState(seed).permutation(len(whole))[:count]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self._whole[int(self._indices[index])]

    def name(self, index: int) -> str:
        return self._whole.name(int(self._indices[index]))

    def fingerprint(self) -> str:
        return hashlib.sha256(self._whole.fingerprint().encode() + self._indices.astype("<i8").tobytes()).hexdigest()
