"""Photos with segmentations, and which reader a path has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visattn._support.checks import printable
from visattn._support.files import is_folder
from visattn._support.reprs import brief, in_pixels
from visattn.core.images.sources import load_image
from visattn.errors import ImageError

VOID = -1  # label of pixels that count nowhere
_OUTLINE = 255  # of objects of VOC
_IMAGES = ".jpg", ".jpeg", ".png"


class SegmentedPhoto(NamedTuple):
    """A photo with its segmentation.

    Attributes:
        name: Name of the photo.
        image: The photo.
        labels: `(height, width)`: 0 is background, -1 is neither, all else numbers classes or parts.
        objects: `(objects, height, width)` masks of single objects; None if they are not told apart.
    """

    name: str
    image: Image.Image
    labels: NDArray[np.int64]
    objects: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class SegmentedPhotos:
    """Photos with segmentations, which are read on access.

    Attributes:
        names: Names of the photos.
        read: Function that reads the photo of a number.
    """

    names: tuple[str, ...]
    read: Callable[[int], SegmentedPhoto]

    __repr__ = brief

    def __len__(self) -> int:
        """Return the number of photos."""
        return len(self.names)

    def __getitem__(self, number: int) -> SegmentedPhoto:
        """Read a photo.

        Raises:
            ImageError: If a file cannot be read, or photo and segmentation differ in size.
        """
        return self.read(range(len(self.names))[number])

    def __iter__(self) -> Iterator[SegmentedPhoto]:
        """Read the photos one by one."""
        return (self[number] for number in range(len(self)))


def load_segmented(path: str | os.PathLike[str], *, split: str = "val", background: int = 0) -> SegmentedPhotos:
    """Return the photos of a data set with segmentations, which is there already.

    Args:
        path: The folder `VOC2012` of VOC; the file `gtsegs_ijcv.mat` of ImageNet-Segmentation; or a folder with the folders `images` and
            `annotations`, as PartImageNet has them, with an annotation in one channel (.png) for each image, of the same name.
        split: Of VOC the list in `ImageSets/Segmentation`; else a folder inside of `images` and `annotations`, if there is one.
        background: Label of the background in annotations; PartImageNet gives it the largest number.

    Returns:
        The photos.

    Raises:
        ImageError: If the path is none of these.
        MissingExtra: If h5py is needed and not installed.
    """
    place = Path(path)
    if place.suffix.lower() == ".mat":
        from visattn.data.segmented.imagenet_segmentation import imagenet_segmentation

        return imagenet_segmentation(place)
    if is_folder(place / "JPEGImages"):
        return _voc(place, split)
    if is_folder(place / "images") and is_folder(place / "annotations"):
        return _folders(place, split, background)
    raise ImageError(
        f"{printable(str(place))}: neither gtsegs_ijcv.mat, nor a folder with JPEGImages (VOC), nor one with images and annotations"
    )


def _voc(root: Path, split: str) -> SegmentedPhotos:
    listed = root / "ImageSets" / "Segmentation" / f"{split}.txt"
    try:
        names = tuple(listed.read_text(encoding="utf-8").split())
    except OSError as error:
        raise ImageError(
            f"{printable(str(listed))}: cannot be read ({(error.strerror or str(error)).lower()}); pass another split"
        ) from error

    def read(number: int) -> SegmentedPhoto:
        name = names[number]
        image = load_image(root / "JPEGImages" / f"{name}.jpg")
        classes, objects = (_numbers(root / f"Segmentation{kind}" / f"{name}.png", image) for kind in ("Class", "Object"))
        labels = np.where(classes == _OUTLINE, VOID, classes)
        of = [number for number in np.unique(objects) if number not in (0, _OUTLINE)]
        masks = np.stack([objects == number for number in of]) if of else np.zeros((0, *objects.shape), bool)
        return SegmentedPhoto(name, image, labels, masks)

    return SegmentedPhotos(names, read)


def _folders(root: Path, split: str, background: int) -> SegmentedPhotos:
    images, annotations = (
        root / name / split if is_folder(root / name / split) else root / name for name in ("images", "annotations")
    )
    files = {path.stem: path for path in sorted(images.rglob("*")) if path.suffix.lower() in _IMAGES}
    told = {path.stem: path for path in sorted(annotations.rglob("*.png"))}
    names = tuple(name for name in files if name in told)
    if not names:
        raise ImageError(f"{printable(str(root))}: no image has an annotation of its name (.png)")

    def read(number: int) -> SegmentedPhoto:
        name = names[number]
        image = load_image(files[name])
        found = _numbers(told[name], image)
        labels = np.where(found == background, 0, found + (1 if background else 0))
        return SegmentedPhoto(name, image, labels)

    return SegmentedPhotos(names, read)


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
