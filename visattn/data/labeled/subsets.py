"""Subsets of labeled images: a random one, and a part of each class held out."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from visattn._support.checks import printable
from visattn._support.language import flag
from visattn.errors import DataError


class Subset:
    """Some images of a dataset, in the order of their indices; see `LabeledDataset`."""

    def __init__(self, whole: Any, indices: ArrayLike) -> None:  # noqa: ANN401 - a LabeledDataset
        """Choose the images of a dataset `whole` by their indices."""
        self.classes, self.channels, self.size = whole.classes, whole.channels, whole.size
        self._whole, self._indices = whole, np.asarray(indices)
        self.labels: NDArray[np.int64] = whole.labels[self._indices]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Return an image and its label."""
        picture, label = self._whole[int(self._indices[index])]
        return picture, label

    def name(self, index: int) -> str:
        """Return the name that the whole dataset gives the image."""
        return str(self._whole.name(int(self._indices[index])))

    def fingerprint(self) -> str:
        """Return a sha256 of the whole dataset and the indices."""
        return hashlib.sha256(self._whole.fingerprint().encode() + self._indices.astype("<i8").tobytes()).hexdigest()


def drawn_from(whole: Any, count: int, seed: int, title: str) -> Subset:  # noqa: ANN401 - a LabeledDataset
    """Draw images at random, in random order. numpy guarantees that the stream of `RandomState` never changes.

    Raises:
        DataError: If there are fewer.
    """
    if count > len(whole):
        raise DataError(f"{title}: count must be at most {len(whole)}, the number of images, got {count}. Lower it.")
    return Subset(whole, np.random.RandomState(seed).permutation(len(whole))[:count])


def held_out(whole: Any, share: float, seed: int) -> tuple[Subset, Subset]:  # noqa: ANN401 - a LabeledDataset
    """Divide a dataset: return the images that stay, and those held out, a share of each class.

    Args:
        whole: Dataset with two or more classes.
        share: Share of each class that is held out; at least one image of each class is, and one stays.
        seed: Seed of the choice.

    Raises:
        DataError: If a class has a single image.
    """
    random = np.random.RandomState(seed)
    apart = np.zeros(len(whole), dtype=bool)
    for label in np.unique(whole.labels):
        members = random.permutation(np.flatnonzero(whole.labels == label))
        if len(members) < 2:
            raise DataError(
                f"class '{printable(whole.classes[int(label)])}' has one training image, so none can be held out. Add images, or leave "
                f"validation out{flag('validation')}."
            )
        apart[members[: min(max(round(share * len(members)), 1), len(members) - 1)]] = True
    return Subset(whole, np.flatnonzero(~apart)), Subset(whole, np.flatnonzero(apart))
