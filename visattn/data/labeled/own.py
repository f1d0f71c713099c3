"""Labeled images from the user's own dataset, made by a function in a Python file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visattn._support.checks import first_line, printable, shown
from visattn._support.own_code import made
from visattn._support.types import Split
from visattn.data.image_dataset import common_size, looked_at
from visattn.data.labeled.arrays import check_learnable
from visattn.errors import DataError, ImageError


class OwnDataset:
    """Dataset that `file.py:factory` returns for a split; see `LabeledDataset`.

    The function is called with `split="train"` and `split="test"`. It returns a map-style dataset, as `torch.utils.data.Dataset`: its items
    are an image and a class index. Images are of PIL or uint8 arrays `(H, W)` or `(H, W, 3)`, without augmentation. The label of an item
    is its own. It is read from `targets` or `labels`, as in torchvision, if these agree with some items, else from every item once. Names
    of classes are read from its `classes`, else they are the indices. Whether images are gray, and their size, is read from a few. A
    worker process calls the function again.
    """

    def __init__(self, name: str, split: Split) -> None:
        """Make the dataset and read its labels.

        Raises:
            DataError: If the file or the function fails, or what it returns is no such dataset.
        """
        self._name, self._split = name, split
        self.title = printable(f"{name} {split}")
        self._dataset: Any = made(name, DataError, split=split)
        self._count = self._length()
        self._from_list = False  # whether the labels are those of the dataset's list
        self.labels = self._read_labels()
        known = _listed(getattr(self._dataset, "classes", None))
        self.classes = tuple(map(str, range(int(self.labels.max(initial=-1)) + 1) if known is None else known))
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= len(self.classes)))
        if wrong.size:
            raise DataError(
                f"{self.title}: labels must lie from 0 to {len(self.classes) - 1}, got {self.labels[wrong[0]]} for item {wrong[0]}. "
                "Correct it, or name more classes."
            )
        check_learnable(self.labels, self.classes, self.title)
        some = [*self._readable(self._some())]
        self.channels = 1 if all(picture.mode == "L" for picture in some) else 3
        self.size = common_size([(picture.height, picture.width) for picture in some])

    def _length(self) -> int:
        kind = type(self._dataset).__name__
        if isinstance(self._dataset, type):
            name = self._dataset.__name__
            raise DataError(f"{self.title}: the function returns the class {name}; return {name}(...).")
        if not (hasattr(self._dataset, "__len__") and hasattr(self._dataset, "__getitem__")):
            raise DataError(f"{self.title}: the function returns a {kind}; return a dataset with __len__ and __getitem__.")
        try:
            return len(self._dataset)
        except Exception as error:  # the user's code may raise anything
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise DataError(f"{self.title}: the length of the {kind} cannot be read ({cause}). Correct its __len__.") from error

    def _readable(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Yield the images that can be read.

        Raises:
            ImageError: If none can, the error of the first.
        """
        errors: list[ImageError] = []
        for index in indices:
            try:
                yield self[index][0]
            except ImageError as error:
                errors.append(error)
        if len(errors) == len(indices):
            raise errors[0]

    def _read_labels(self) -> NDArray[np.int64]:
        told = _listed(getattr(self._dataset, "targets", getattr(self._dataset, "labels", None)))
        if told is not None and len(told) != self._count:
            raise DataError(f"{self.title}: must have one label per item, got {self._count} items and {len(told)} labels.")
        self._from_list = told is not None and self._agrees(told)
        if told is None or not self._from_list:
            told = [self._item(index)[1] for index in range(self._count)]
        return np.asarray([self._class(index, label) for index, label in enumerate(told)], dtype=np.int64)

    def _agrees(self, told: Sequence[Any]) -> bool:
        """Check that labels beside the items are those of some items; `target_transform` of torchvision changes the items alone."""
        for index in self._some():
            with suppress(ImageError):
                if self._class(index, told[index]) != self._class(index, self._item(index)[1]):
                    return False
        return True

    def _some(self) -> list[int]:
        return looked_at(self._count)

    def _class(self, index: int, label: Any) -> int:  # noqa: ANN401 - the user's
        """Return a label as a class index.

        Raises:
            DataError: If it is no whole number.
        """
        try:
            number = int(label)
            whole = not isinstance(label, str) and number == label
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{self.title}: labels must be class indices ({first_line(error)}). Return whole numbers.") from error
        if not whole:
            got = f"the text {shown(label)}" if isinstance(label, str) else printable(str(label))
            raise DataError(f"{self.title}: labels must be class indices, got {got} for item {index}. Return whole numbers.")
        return number

    def check_apart(self, other: OwnDataset) -> None:
        """Check that another split does not hold the same items.

        Raises:
            DataError: If all items that are looked at are equal.
        """
        if len(self) == len(other) and np.array_equal(self.labels, other.labels):
            pairs = list(zip(self._looks(), other._looks(), strict=True))
            if pairs and all(one == two for one, two in pairs):
                name = self._name.rpartition(":")[2]
                raise DataError(
                    f"{printable(self._name)}: {name}() returns equal items for both splits, in all {len(pairs)} that were compared. "
                    "Return others for split='test'."
                )

    def _looks(self) -> Iterator[tuple[Any, ...]]:
        """Yield the size and the pixels of some items, or nothing of one that cannot be read."""
        for index in self._some():
            try:
                picture = self[index][0]
            except ImageError:
                yield (index,)
            else:
                yield picture.size, picture.tobytes()

    def _item(self, index: int) -> tuple[Any, Any]:
        """Return an item of the dataset.

        Raises:
            ImageError: If the dataset fails, or the item is no pair.
            DataError: If it is a dictionary.
        """
        try:
            item = self._dataset[index]
            if not isinstance(item, Mapping):
                picture, label = item
                return picture, label
        except Exception as error:  # the user's code may raise anything
            raise ImageError(f"{self.name(index)}: cannot be read ({type(error).__name__}: {first_line(error)})") from error
        kind = type(item).__name__
        raise DataError(f"{self.name(index)}: an item must be a pair (image, class index), got a {kind}. Return a pair.")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Return an image, gray or RGB, and its label.

        Raises:
            ImageError: If the item cannot be read.
            DataError: If it is no image.
        """
        picture, label = self._item(index)
        if self._class(index, label) != self.labels[index]:
            known = (
                f"{self.labels[index]} in the dataset's list of labels. Make them agree, or leave the list out."
                if self._from_list
                else f"was {self.labels[index]} when it was first read. Return the same label each time."
            )
            raise DataError(f"{self.name(index)}: the label of the item is {printable(str(label))}, and {known}")
        if isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.shape[2:] in ((), (3,)) and picture.ndim > 1:
            picture = Image.fromarray(picture)
        if not isinstance(picture, Image.Image):
            what = f"{picture.dtype} {tuple(picture.shape)}" if hasattr(picture, "dtype") else type(picture).__name__
            raise DataError(
                f"{self.name(index)}: must be an image of PIL or a uint8 array (H, W) or (H, W, 3), got {what}. Return one of these, "
                "without transforms."
            )
        return picture.convert("L" if picture.mode in ("L", "1") else "RGB"), int(self.labels[index])

    def name(self, index: int) -> str:
        """Return the function, the split and the index."""
        return f"{self.title} {index}"

    def fingerprint(self) -> str:
        """Return a sha256 of the file with the function, the classes and the labels. Pixels are not read."""
        file = self._name.rpartition(":")[0]
        digest = hashlib.sha256(json.dumps([self._split, self.classes]).encode())
        with open(file, "rb") as stream:  # noqa: PTH123 - a few lines of code
            digest.update(stream.read())
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a pickle that calls the function again."""
        return OwnDataset, (self._name, self._split)


def _listed(attribute: Any) -> list[Any] | None:  # noqa: ANN401 - the user's
    """Return what an attribute lists, one for each item or class; None if it is something else, such as a count or a dictionary."""
    if isinstance(attribute, str | Mapping) or not (hasattr(attribute, "__len__") and hasattr(attribute, "__iter__")):
        return None
    return [*attribute]
