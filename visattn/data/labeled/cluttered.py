"""Cluttered images: each item lies anywhere in a larger image, possibly turned, among pieces of other items."""

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

    With `turn` above 0, each item is rotated about its center by a random angle of at most `turn` degrees to either side.

    Attributes:
        classes: Names of the classes.
        labels: `(N,)`, indices into `classes`.
        channels: 1.
        size: `(60, 60)`.
        title: Name of the dataset.

    Reference:
        Mnih, Heess, Graves & Kavukcuoglu, "Recurrent Models of Visual Attention", NeurIPS 2014, arXiv:1406.6247, section 4.1: MNIST in 60 x
        60 pixels with four pieces of 8 x 8 pixels. Differs: any gray dataset; an item covers pieces that lie below it; rotations.
    """

    def __init__(self, whole: ArrayDataset, seed: int, title: str, turn: float = 0.0) -> None:
        """Take the items and the pieces from a dataset of gray images of at most 60 x 60 pixels."""
        self.classes, self.labels, self.channels, self.title = whole.classes, whole.labels, 1, title
        self.size: tuple[int, int] | None = (SIDE, SIDE)
        self._whole, self._seed, self._turn = whole, seed, turn

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
        item = self._whole.pixels[index]
        if self._turn:
            angle = random.uniform(-self._turn, self._turn)
            item = np.asarray(Image.fromarray(item).rotate(angle, Image.Resampling.BILINEAR))
        _put(random, image, item)
        return Image.fromarray(image), int(self.labels[index])

    def name(self, index: int) -> str:
        """Return the title of the dataset and the index."""
        return f"{self.title} {index}"

    def fingerprint(self) -> str:
        """Return a sha256 of the items, the version, the seed and the largest angle."""
        turn = f" {self._turn:g}" if self._turn else ""
        return hashlib.sha256(f"{self._whole.fingerprint()} {_VERSION} {self._seed}{turn}".encode()).hexdigest()


def _put(random: np.random.RandomState, image: NDArray[np.uint8], part: NDArray[np.uint8]) -> None:
    """Paste a part at a random place; its black pixels are transparent."""
    height, width = part.shape
    y, x = random.randint(SIDE - height + 1), random.randint(SIDE - width + 1)
    where = image[y : y + height, x : x + width]
    np.copyto(where, part, where=part > 0)
