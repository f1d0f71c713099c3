"""Interface that every image dataset of this package implements."""

from __future__ import annotations

from typing import Any, Protocol

from PIL import Image


class ImageDataset(Protocol):
    """Images with a label or captions each."""

    @property
    def channels(self) -> int:
        """Number of channels: 1 for gray images, 3 for RGB."""
        ...

    @property
    def size(self) -> tuple[int, int] | None:
        """Size `(height, width)` of the images; None if they differ in size."""
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
