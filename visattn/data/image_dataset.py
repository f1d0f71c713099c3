"""Interface that every image dataset of this package implements."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from PIL import Image

from visattn.errors import ImageError

_LOOKED_AT = 16


class _Indexed(Protocol):
    """Sequence of images, each with something else."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]: ...


class ImageDataset(Protocol):
    """Images with a label or captions each."""

    @property
    def channels(self) -> int:
        """Number of channels: 1 for gray images, 3 for RGB."""
        ...

    @property
    def size(self) -> tuple[int, int] | None:
        """Size `(height, width)` of the images; if they differ, of a square as large as the largest side; None if it is unknown."""
        ...

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        """Return an image with its label or captions.

        Raises:
            ImageError: If the image cannot be read; the message names the file.
        """
        ...

    def name(self, index: int) -> str:
        """Return a printable name of an image: its file, or for example `fashion-mnist train 17`."""
        ...

    def fingerprint(self) -> str:
        """Return a sha256 that identifies the content of the dataset."""
        ...


def looked_at(count: int) -> list[int]:
    """Return the indices of some of `count` images, spread evenly."""
    return [*dict.fromkeys(np.linspace(0, count - 1, _LOOKED_AT, dtype=int).tolist())] if count else []


def size_of(pictures: _Indexed) -> tuple[int, int] | None:
    """Return the size of images, as some of them have it; see `ImageDataset.size`. Those that cannot be read are left out."""
    sizes = []
    for index in looked_at(len(pictures)):
        with suppress(ImageError):
            picture = pictures[index][0]
            sizes.append((picture.height, picture.width))
    return common_size(sizes)


def common_size(sizes: Collection[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the size of all; if they differ, that of a square as large as the largest side."""
    if len(set(sizes)) < 2:
        return next(iter(sizes), None)
    side = max(map(max, sizes))
    return side, side
