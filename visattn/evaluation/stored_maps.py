"""Maps and masks of photos, found in folders by the photos' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from visattn._support.checks import first_line, printable, unreadable
from visattn._support.files import base_name, is_folder, regular
from visattn.core.images.sources import load_image
from visattn.core.maps import load_map
from visattn.errors import MapError
from visattn.evaluation.given import MapLike, MaskLike

MAPS = ".npz", ".npy", ".csv", ".txt", ".tif", ".tiff", ".png"
MASKS = ".png", ".npy", ".tif", ".tiff", ".bmp", ".gif"


def stored(photo: Path, folder: Path, endings: Sequence[str]) -> Path:
    """Return the file of a photo in a folder: the photo's name with one of these endings, also after the photo's own.

    Raises:
        MapError: If the folder does not exist, or holds no such file, or several.
    """
    if not is_folder(folder):
        raise MapError(f"{printable(str(folder))}: no such folder; check the path")
    names = photo.stem, photo.name
    paths = [folder / f"{name}{ending}" for name in dict.fromkeys(names) for ending in endings]
    found = [path for path in paths if path.is_file()]
    if len(found) == 1:
        return found[0]
    wanted = f"{printable(photo.stem)} with one of {', '.join(endings)}"
    if not found:
        raise MapError(f"{printable(str(folder))}: no file for {printable(photo.name)}; it is called {wanted}")
    both = ", ".join(printable(path.name) for path in found)
    raise MapError(f"{printable(str(folder))}: several files for {printable(photo.name)} ({both}); keep one")


def map_of(path: Path) -> MapLike:
    """Read a map: one that visattn saved, an array as other libraries give it (see `as_map`), numbers as text, or a gray image.

    Raises:
        MapError: If the file holds no map.
    """
    if path.suffix.lower() != ".npy":
        read = load_map(path)
        if not isinstance(read, tuple):
            return read
        found, geometry = read
        return replace(found, provenance=found.provenance.but(geometry=geometry))
    try:
        array = np.load(regular(path), mmap_mode="r", allow_pickle=False)
        return np.array(array, np.float64)
    except OSError as error:
        raise MapError(unreadable(error, path)) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise MapError(f"{printable(str(path))}: holds no array of numbers ({first_line(error).rstrip('.')})") from error


def mask_of(path: Path) -> MaskLike:
    """Read a mask: an array, or an image of one channel.

    Raises:
        MapError: If the file holds no mask.
        ImageError: If the image cannot be read.
    """
    if path.suffix.lower() == ".npy":
        return np.asarray(map_of(path))
    return np.asarray(load_image(path).convert("L"))


def name_of(folder: Path) -> str:
    """Return the name of the maps in a folder."""
    return printable(base_name(str(folder)))
