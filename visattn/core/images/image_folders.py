"""Image files in a folder and its subfolders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from visattn.core.images.loading import FORMATS

__all__ = ["endings_of_photos", "photos_in"]


def endings_of_photos() -> set[str]:
    """Return the endings of files in the formats that are read, in lower case, with their dot."""
    return {ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS}


def photos_in(folder: Path, but: Path | None = None) -> tuple[list[Path], list[OSError]]:
    """List the image files in a folder and its subfolders, recognized by their endings. Hidden files and folders are left out.

    Args:
        folder: The folder. Links are followed, and each folder is read once.
        but: Folder that is left out, such as that of the results.

    Returns:
        The files, sorted, and the errors of folders that cannot be read.
    """
    endings = endings_of_photos()
    refused: list[OSError] = []

    def walk() -> Iterator[Path]:
        seen = {None if but is None else but.resolve()}
        for place, folders, files in os.walk(folder, onerror=refused.append, followlinks=True):
            if (real := Path(place).resolve()) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(child for child in folders if not child.startswith("."))
            yield from (Path(place, file) for file in files if not file.startswith("."))

    return sorted(file for file in walk() if file.suffix.lower() in endings), refused
