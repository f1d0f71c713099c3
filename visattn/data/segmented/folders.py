"""Folders of photos with annotations: VOC 2012, and any with the folders `images` and `annotations`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visattn._support.checks import printable
from visattn._support.files import is_folder
from visattn._support.reprs import in_pixels
from visattn.core.images.sources import load_image
from visattn.data.segmented.segmented_photos import VOID, SegmentedPhoto, SegmentedPhotos
from visattn.errors import ImageError

_OUTLINE = 255  # of objects of VOC
_IMAGES = ".jpg", ".jpeg", ".png"


def voc(root: Path, split: str) -> SegmentedPhotos:
    """Return the photos of a list of VOC; see `load_segmented`.

    Raises:
        ImageError: If the list cannot be read.
    """
    listed = root / "ImageSets" / "Segmentation" / f"{split}.txt"
    try:
        names = tuple(listed.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", "") or str(error)).lower()
        raise ImageError(f"{printable(str(listed))}: cannot be read ({reason}); pass another split") from error
    if not names:
        raise ImageError(f"{printable(str(listed))}: names no photos; pass another split")

    def read(number: int) -> SegmentedPhoto:
        name = names[number]
        image = load_image(root / "JPEGImages" / f"{name}.jpg")
        classes, objects = (_numbers(root / f"Segmentation{kind}" / f"{name}.png", image) for kind in ("Class", "Object"))
        labels = np.where(classes == _OUTLINE, VOID, classes)
        of = [number for number in np.unique(objects) if number not in (0, _OUTLINE)]
        masks = np.stack([objects == number for number in of]) if of else np.zeros((0, *objects.shape), bool)
        return SegmentedPhoto(name, image, labels, masks)

    return SegmentedPhotos(names, read)


def folders(root: Path, split: str, background: int) -> SegmentedPhotos:
    """Return the photos of the folder `images` that have an annotation; see `load_segmented`.

    Raises:
        ImageError: If there is none, or if two files have one name.
    """
    images, annotations = (
        root / name / split if is_folder(root / name / split) else root / name for name in ("images", "annotations")
    )
    for whole in (True, False):
        files, told = _by_name(images, _IMAGES, whole=whole), _by_name(annotations, (".png",), whole=whole)
        if names := tuple(name for name in files if name in told):
            break
    else:
        raise ImageError(f"{printable(str(root))}: no image has an annotation of its name (.png)")

    def read(number: int) -> SegmentedPhoto:
        name = names[number]
        image = load_image(files[name])
        found = _numbers(told[name], image)
        labels = np.where(found == background, 0, found + (1 if background else 0))
        return SegmentedPhoto(name, image, labels)

    return SegmentedPhotos(names, read)


def _by_name(root: Path, endings: tuple[str, ...], *, whole: bool) -> dict[str, Path]:
    """Return files by what an image and its annotation share: the whole path inside of their folders without the ending, or its last part.

    Raises:
        ImageError: If two files have one name.
    """
    found = dict[str, Path]()
    for path in sorted(path for path in root.rglob("*") if path.suffix.lower() in endings):
        name = path.relative_to(root).with_suffix("").as_posix() if whole else path.stem
        if name in found:
            raise ImageError(f"{printable(str(path))}: has the name of {printable(str(found[name]))}; rename one")
        found[name] = path
    return found


def _numbers(path: Path, image: Image.Image) -> NDArray[np.int64]:
    """Read an annotation: the numbers of its pixels, those of the palette if it has one.

    Raises:
        ImageError: If it cannot be read, has several channels, or another size than the image.
    """
    try:
        with Image.open(path) as picture:
            numbers = np.asarray(picture)
    except (OSError, SyntaxError, ValueError) as error:
        raise ImageError(f"{printable(str(path))}: cannot be read as an annotation ({str(error)[:100].lower()})") from error
    if numbers.shape != (image.height, image.width):
        size = in_pixels((image.height, image.width))
        raise ImageError(f"{printable(str(path))}: must have one channel of {size} pixels, as the image; got {numbers.shape}")
    return numbers.astype(np.int64)
