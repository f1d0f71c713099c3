"""Cluttered, translated images: each item lies anywhere in a larger image, among pieces of other items."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visattn.data.labeled.arrays import ArrayDataset

SIDE = 60  # pixels
PIECES, PIECE = 4, 8  # number and side of the pieces
_VERSION = 1


class Cluttered:
    """Gray images `(60, 60)` made of a smaller dataset: where the item is must be found before it can be named.

    An image depends only on the version of the generator, the seed and the index. Its label is that of the item.

    Attributes:
        classes: Names of the classes.
        labels: `(N,)`, indices into `classes`.
        channels: 1.
        size: `(60, 60)`.
        title: Name of the dataset.

    Reference:
        Mnih, Heess, Graves & Kavukcuoglu, "Recurrent Models of Visual Attention", NeurIPS 2014, arXiv:1406.6247, section 4.1: MNIST in 60 x
        60 pixels with four pieces of 8 x 8 pixels. Differs: any gray dataset; an item covers pieces that lie below it.
    """

    def __init__(self, whole: ArrayDataset, seed: int, title: str) -> None:
        """Take the items and the pieces from a dataset of gray images of at most 60 x 60 pixels."""
        self.classes, self.labels, self.channels, self.title = whole.classes, whole.labels, 1, title
        self.size: tuple[int, int] | None = (SIDE, SIDE)
        self._whole, self._seed = whole, seed

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._whole)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Return an image and its label."""
        random = np.random.RandomState([self._seed, index])
        image = np.zeros((SIDE, SIDE), np.uint8)
        for other in random.randint(len(self), size=PIECES):
            y, x = (random.randint(side - PIECE + 1) for side in self._whole.pixels.shape[1:])
            _put(random, image, self._whole.pixels[other, y : y + PIECE, x : x + PIECE])
        _put(random, image, self._whole.pixels[index])
        return Image.fromarray(image), int(self.labels[index])

    def name(self, index: int) -> str:
        """Return the title of the dataset and the index."""
        return f"{self.title} {index}"

    def fingerprint(self) -> str:
        """Return a sha256 of the items, the version and the seed."""
        return hashlib.sha256(f"{self._whole.fingerprint()} {_VERSION} {self._seed}".encode()).hexdigest()


def _put(random: np.random.RandomState, image: NDArray[np.uint8], part: NDArray[np.uint8]) -> None:
    """Paste a part at a random place; its black pixels are transparent."""
    height, width = part.shape
    y, x = random.randint(SIDE - height + 1), random.randint(SIDE - width + 1)
    where = image[y : y + height, x : x + width]
    np.copyto(where, part, where=part > 0)
