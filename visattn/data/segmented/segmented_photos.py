"""Photos with segmentations, read on access."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visattn._support.reprs import brief

VOID = -1  # label of pixels that count nowhere


class SegmentedPhoto(NamedTuple):
    """A photo with its segmentation.

    Attributes:
        name: Name of the photo.
        image: The photo.
        labels: `(height, width)`: 0 is background, -1 is neither, all else numbers classes or parts.
        objects: `(objects, height, width)` masks of single objects; None if they are not told apart.
    """

    name: str
    image: Image.Image
    labels: NDArray[np.int64]
    objects: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class SegmentedPhotos:
    """Photos with segmentations, which are read on access.

    Attributes:
        names: Names of the photos.
        read: Function that reads the photo of a number.
    """

    names: tuple[str, ...]
    read: Callable[[int], SegmentedPhoto]

    __repr__ = brief

    def __len__(self) -> int:
        """Return the number of photos."""
        return len(self.names)

    def __getitem__(self, number: int) -> SegmentedPhoto:
        """Read a photo.

        Raises:
            ImageError: If a file cannot be read, or photo and segmentation differ in size.
        """
        return self.read(range(len(self.names))[number])

    def __iter__(self) -> Iterator[SegmentedPhoto]:
        """Read the photos one by one."""
        return (self[number] for number in range(len(self)))
