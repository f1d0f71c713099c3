"""Labeled images in one array, in memory or memory-mapped, and a check that labels can be trained on."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from visattn._support.checks import printable
from visattn.errors import DataError

_ROWS = 1024  # images hashed at a time


class ArrayDataset:
    """Labeled images stored in one array.

    If the array is a whole, read-only `numpy.memmap`, a pickle stores only its file name, and loader workers map the file again.

    Attributes:
        pixels: `(N, H, W)` or `(N, H, W, 3)`, uint8.
        labels: `(N,)`, indices into `classes`.
        classes: Names of the classes.
        channels: 1 or 3.
        size: `(height, width)`.
        title: Name of the dataset.
    """

    def __init__(
        self, pixels: ArrayLike, labels: ArrayLike, classes: Sequence[str], title: str = "array", *, source: str | None = None
    ) -> None:
        """Check and store the arrays without copying the pixels.

        Args:
            pixels: `(N, H, W)` gray or `(N, H, W, 3)` RGB, uint8.
            labels: `(N,)`, integers from 0 to `len(classes) - 1`.
            classes: Names of the classes, two or more.
            title: Name of the dataset in messages.
            source: Text that identifies the pixels in the fingerprint, so that they need not be hashed.

        Raises:
            DataError: If an array has another shape or type, or the labels cannot be trained on.
        """
        array, numbers = np.asanyarray(pixels), np.asarray(labels)
        if array.dtype != np.uint8 or not (array.ndim == 3 or (array.ndim == 4 and array.shape[3] == 3)) or 0 in array.shape[1:]:
            got = f"{array.dtype} {array.shape}.{_to_mend(array)}"
            raise DataError(f"{title}: pixels must be uint8 of shape (N, H, W) or (N, H, W, 3), got {got}")
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise DataError(
                f"{title}: labels must be integers of shape (N,), got {numbers.dtype} {numbers.shape}. Pass class indices."
            )
        if len(array) != len(numbers):
            raise DataError(f"{title}: must have one label per image, got {len(array)} images and {len(numbers)} labels.")
        wrong = np.flatnonzero((numbers < 0) | (numbers >= len(classes)))
        if wrong.size:
            raise DataError(
                f"{title}: labels must lie from 0 to {len(classes) - 1}, got {numbers[wrong[0]]} for image {wrong[0]}. "
                "Correct it, or name more classes."
            )
        check_learnable(numbers, classes, title)
        self.pixels, self.labels, self.classes, self.title = array, numbers.astype(np.int64), tuple(classes), title
        self.channels = 1 if array.ndim == 3 else 3
        self.size: tuple[int, int] | None = (array.shape[1], array.shape[2])
        self._source, self._digest = source, ""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Return an image, gray or RGB, and its label."""
        return Image.fromarray(self.pixels[index]), int(self.labels[index])

    def name(self, index: int) -> str:
        """Return the title of the dataset and the index."""
        return printable(f"{self.title} {index}")

    def fingerprint(self) -> str:
        """Return a sha256 of classes, labels, shape and pixels; the source, if given, replaces the pixels."""
        if not self._digest:
            digest = hashlib.sha256(json.dumps([self.classes, self.pixels.shape, self._source]).encode())
            digest.update(self.labels.astype("<i8").data)
            if self._source is None:
                for start in range(0, len(self), _ROWS):
                    digest.update(np.ascontiguousarray(self.pixels[start : start + _ROWS]).data)
            self._digest = digest.hexdigest()
        return self._digest

    def __getstate__(self) -> dict[str, Any]:
        """Replace a memory-mapped array by its file name, so that a pickle stays small.

        A view of a part of a file is pickled in full, since numpy does not record which part it is.
        """
        array, base = self.pixels, cast(object, self.pixels.base)
        if isinstance(array, np.memmap) and isinstance(base, mmap.mmap) and array.mode == "r" and array.flags.c_contiguous:
            return self.__dict__ | {"pixels": _Mapped(str(array.filename), array.offset, array.shape)}
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the array again if it was memory-mapped."""
        pixels = state["pixels"]
        self.__dict__.update(state | {"pixels": pixels.open() if isinstance(pixels, _Mapped) else pixels})


class _Mapped(NamedTuple):
    """Location of a memory-mapped uint8 array in its file; numpy keeps absolute paths."""

    path: str
    offset: int
    shape: tuple[int, ...]

    def open(self) -> NDArray[np.uint8]:
        return np.memmap(self.path, np.uint8, "r", self.offset, self.shape)


def _to_mend(array: NDArray[Any]) -> str:
    """Return what to do with an array of pixels that has another type or shape."""
    fix = "" if array.dtype == np.uint8 else " Convert them to uint8, from 0 to 255."
    if array.ndim == 4 and 1 in (array.shape[1], array.shape[3]):
        return f"{fix} Drop the axis of length 1."
    if array.ndim == 4 and array.shape[3] == 4:
        return f"{fix} Drop the fourth channel."
    return f"{fix} Put channels last." if array.ndim == 4 and array.shape[1] in (3, 4) and array.shape[3] != 3 else fix


def check_learnable(labels: NDArray[Any], classes: Sequence[str], title: str) -> None:
    """Check that labels can be trained on.

    Args:
        labels: `(N,)`, indices into `classes`.
        classes: Names of the classes.
        title: Name of the data in the message.

    Raises:
        DataError: If there are fewer than two images or fewer than two classes.
    """
    found = np.unique(labels)
    if len(labels) < 2:
        raise DataError(f"{title}: must hold two images or more, got {len(labels) or 'none'}. Add images.")
    if len(found) < 2:
        raise DataError(
            f"{title}: must hold two classes or more, got {len(labels)} images of '{printable(classes[int(found[0])])}' only. "
            "Add images of another class."
        )
