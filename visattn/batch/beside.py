"""Files that belong to photos and are named as they are: masks of objects, and texts."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from visattn._support.checks import first_line, printable, unreadable
from visattn._support.files import exists, is_folder
from visattn._support.lazily import Lazily
from visattn.batch.items import Item
from visattn.core.images import load_file
from visattn.errors import ImageError, OptionError


def apart(images: Sequence[Path], masks: Path | None) -> Path | None:
    """Return the folder of masks, whose files are no photos, unless it holds the images too."""
    return None if masks is None or masks.resolve() in {path.resolve() for path in images} else masks


def masks_of(items: Sequence[Item], masks: Path) -> Sequence[NDArray[np.bool_]]:
    """Find the mask of each photo, in any image format.

    Returns:
        The masks, each read when it is asked for.

    Raises:
        ImageError: If a photo has no mask or several, or when it is read, a mask cannot be read.
    """
    files = _beside(items, masks, "mask", ".*")
    return Lazily(len(files), lambda number: np.asarray(load_file(files[number]).convert("L")) > 0)


def texts_of(items: Sequence[Item], texts: Path) -> list[str]:
    """Read the text of each photo, in files NAME.txt.

    Raises:
        ImageError: If a photo has no text.
        OptionError: If a text is empty, not UTF-8, or cannot be read.
    """
    found = []
    for file in _beside(items, texts, "text", ".txt"):
        try:
            text = file.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise OptionError(
                f"{printable(str(file))}: cannot be read as text ({first_line(error)}). Save it as UTF-8."
            ) from error
        except OSError as error:
            raise OptionError(unreadable(error, file)) from error
        if not text:
            raise OptionError(f"{printable(str(file))}: is empty. Write a text about the photo.")
        found.append(text)
    return found


def _beside(items: Sequence[Item], place: Path, what: str, ending: str) -> list[Path]:
    """Find the file of each photo: `place` itself for one photo, else the file of the same name in the folder `place`.

    If photos lie in subfolders, so may their files; one in the folder itself is taken if only one photo has its name.

    Raises:
        ImageError: If one is missing or there are several.
    """
    if not exists(place):
        raise ImageError(f"{printable(str(place))}: no such file or folder. Check the path.")
    if is_folder(place):
        shared = Counter(item.path.stem for item in items)
        return [_named(item, place, what, ending, alone=shared[item.path.stem] == 1) for item in items]
    if len(items) > 1:
        raise ImageError(f"{printable(str(place))}: is one {what} for {len(items)} photos. Pass a folder with a {what} for each.")
    return [place]


def _named(item: Item, folder: Path, what: str, ending: str, *, alone: bool) -> Path:
    found: list[Path] = []
    for name in (item.name, item.path.stem) if alone else (item.name,):
        if not found:
            found = [
                file
                for file in sorted(folder.glob(glob.escape(name) + ending))
                if file.stem == Path(name).name and not (item.path.exists() and file.samefile(item.path))
            ]
    if len(found) != 1:
        wanted = printable(name) + (".png" if ending == ".*" else ending)
        raise ImageError(
            f"{printable(str(folder))}: must hold one {what} named {wanted}, got {len(found) or 'none'}. "
            "Add it, or remove the others."
        )
    return found[0]
