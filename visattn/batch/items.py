"""Images of a run, each with the function that reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from PIL import Image

from visattn._support.checks import first_line, printable
from visattn._support.files import is_file
from visattn._support.types import MAX_BYTES, MAX_PIXELS, ColorProfile
from visattn.core.images import decode, image_facts, stating
from visattn.core.images.loading import read_bytes
from visattn.core.images.sources import load_image
from visattn.errors import ImageError, VisattnError

Content = Callable[[int], bytes | Image.Image]


class Item(NamedTuple):
    """An image of a run.

    Attributes:
        source: Its file, its address, or what else names it: `SHARD.tar/MEMBER`, or `file.py:function/INDEX`.
        name: Path of what is written for it, without an ending, relative to the output folder; empty if it is refused.
        content: Function that returns the content of its file, of at most so many bytes, or the image itself; None if `load_image` reads
            `source`.
    """

    source: str
    name: str
    content: Content | None = None

    @property
    def path(self) -> Path:
        """Source as a path, for its name and its folder."""
        return Path(self.source)

    def photo(
        self, *, max_pixels: int = MAX_PIXELS, max_bytes: int = MAX_BYTES, color_profile: ColorProfile = "convert"
    ) -> Image.Image:
        """Load the image; see `visattn.load_image`.

        Raises:
            ImageError: If it cannot be read.
        """
        if self.content is None:
            return load_image(self.source, max_pixels=max_pixels, max_bytes=max_bytes, color_profile=color_profile)
        content = self.content(max_bytes)
        if isinstance(content, bytes):
            return decode(content, self.source, max_pixels=max_pixels, color_profile=color_profile)
        photo = content.copy()  # the dataset may keep it, and give it again
        return stating(photo, replace(image_facts(photo), name=self.name))

    def digest(self, max_bytes: int = MAX_BYTES) -> str:
        """Return the SHA-256 of its file or its pixels; empty if it cannot be read."""
        try:
            content = self._whole(max_bytes)
        except (OSError, VisattnError):
            return ""
        return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else image_facts(content).sha256

    def _whole(self, max_bytes: int) -> bytes | Image.Image:
        if self.content is not None:
            return self.content(max_bytes)
        return read_bytes(self.path, max_bytes) if is_file(self.path) else load_image(self.source, max_bytes=max_bytes)


class Named(NamedTuple):
    """An image, and the name that it would like; names from outside are checked where these are made."""

    source: str
    name: Path
    content: Content | None = None


class Refusal:
    """Content of an input that cannot be read: it raises the error for this one input."""

    def __init__(self, error: VisattnError) -> None:
        """Note the text of the error, without its frames."""
        self.text = str(error)

    def __call__(self, _max_bytes: int) -> NoReturn:
        """Raise the error.

        Raises:
            ImageError: Always; all errors of one input are told as those of an image.
        """
        raise ImageError(self.text)


def refused(source: str, error: VisattnError) -> Named:
    """Return an image that cannot be read, for which no file is written."""
    return Named(source, Path(), Refusal(error))


def fault_error(source: str, error: BaseException) -> ImageError:
    """Return the error for an input at which a library failed in any way."""
    return ImageError(f"{printable(source)}: cannot be read ({type(error).__name__}: {first_line(error)}).")
