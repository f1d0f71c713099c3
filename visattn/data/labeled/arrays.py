"""Labeled pictures that lie in one array, in memory or memory-mapped; and what any labeled pictures must be to learn from."""

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

_ROWS = 1024  # pictures that are hashed at a time


class ArrayPictures:
    """Pictures of one array with their labels.

    Where the array is a whole `numpy.memmap` that is only read, a pickle holds the name of its file: workers of a loader map it again.

    Attributes:
        pixels: `(N, H, W)` or `(N, H, W, 3)`, uint8.
        labels: `(N,)`, indices into `classes`.
        classes: Their names.
        channels: 1 or 3.
        size: `(height, width)`.
        title: What these pictures are called.
    """

    def __init__(
        self, pixels: ArrayLike, labels: ArrayLike, classes: Sequence[str], title: str = "array", *, source: str | None = None
    ) -> None:
        """Check and keep the arrays; nothing is copied.

        Args:
            pixels: `(N, H, W)` gray or `(N, H, W, 3)` RGB, uint8.
            labels: `(N,)`, integers from 0 to one less than there are classes.
            classes: Their names, two or more.
            title: Names the pictures in messages.
            source: What tells the pixels in the fingerprint, where that is cheaper than to read them all.

        Raises:
            DataError: If they are of another shape or type, or there is nothing to be learned from them.
        """
        array, numbers = np.asanyarray(pixels), np.asarray(labels)
        if array.dtype != np.uint8 or not (array.ndim == 3 or (array.ndim == 4 and array.shape[3] == 3)) or 0 in array.shape[1:]:
            raise DataError(
                f"{title}: pixels must be uint8 of shape (N, H, W) or (N, H, W, 3), got {array.dtype} {array.shape}. "
                "Scale them to 0 to 255 and put channels last."
            )
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise DataError(
                f"{title}: labels must be integers of shape (N,), got {numbers.dtype} {numbers.shape}. Pass class indices."
            )
        if len(array) != len(numbers):
            raise DataError(f"{title}: must have one label a picture, got {len(array)} pictures and {len(numbers)} labels.")
        wrong = np.flatnonzero((numbers < 0) | (numbers >= len(classes)))
        if wrong.size:
            raise DataError(
                f"{title}: labels must lie from 0 to {len(classes) - 1}, got {numbers[wrong[0]]} for picture {wrong[0]}. "
                "Correct it, or name more classes."
            )
        check_learnable(numbers, classes, title)
        self.pixels, self.labels, self.classes, self.title = array, numbers.astype(np.int64), tuple(classes), title
        self.channels = 1 if array.ndim == 3 else 3
        self.size: tuple[int, int] | None = (array.shape[1], array.shape[2])
        self._source, self._digest = source, ""

    def __len__(self) -> int:
        """How many."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Picture, gray or RGB, and label."""
        return Image.fromarray(self.pixels[index]), int(self.labels[index])

    def name(self, index: int) -> str:
        """The title and the place in the array."""
        return printable(f"{self.title} {index}")

    def fingerprint(self) -> str:
        """Digest of classes, labels, shape and pixels, or of the source in the place of pixels."""
        if not self._digest:
            digest = hashlib.sha256(json.dumps([self.classes, self.pixels.shape, self._source]).encode())
            digest.update(self.labels.astype("<i8").data)
            if self._source is None:
                for start in range(0, len(self), _ROWS):
                    digest.update(np.ascontiguousarray(self.pixels[start : start + _ROWS]).data)
            self._digest = digest.hexdigest()
        return self._digest

    def __getstate__(self) -> dict[str, Any]:
        """A pickle of a mapped array would hold all its numbers; that of a part of one does, as nothing tells which part."""
        array, base = self.pixels, cast(object, self.pixels.base)
        if isinstance(array, np.memmap) and isinstance(base, mmap.mmap) and array.mode == "r" and array.flags.c_contiguous:
            return self.__dict__ | {"pixels": _Mapped(str(array.filename), array.offset, array.shape)}
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map again what was mapped."""
        pixels = state["pixels"]
        self.__dict__.update(state | {"pixels": pixels.open() if isinstance(pixels, _Mapped) else pixels})


class _Mapped(NamedTuple):
    """Where a mapped array of uint8 lies; numpy keeps absolute paths."""

    path: str
    offset: int
    shape: tuple[int, ...]

    def open(self) -> NDArray[np.uint8]:
        return np.memmap(self.path, np.uint8, "r", self.offset, self.shape)


def check_learnable(labels: NDArray[Any], classes: Sequence[str], title: str) -> None:
    """Refuse what no classifier can learn from.

    Args:
        labels: `(N,)`, indices into `classes`.
        classes: Their names.
        title: Names the data in the message.

    Raises:
        DataError: If there are no pictures, one alone, or one class alone.
    """
    found = np.unique(labels)
    if len(labels) < 2:
        raise DataError(f"{title}: must hold two pictures or more, got {len(labels) or 'none'}. Add pictures.")
    if len(found) < 2:
        raise DataError(
            f"{title}: must hold two classes or more, got {len(labels)} pictures of '{printable(classes[int(found[0])])}' alone. "
            "Add pictures of another class."
        )
