"""Reader of a data set with segmentations, by what its path holds."""

from __future__ import annotations

import os
from pathlib import Path

from visattn._support.checks import printable
from visattn._support.files import is_folder
from visattn.data.segmented.folders import folders, voc
from visattn.data.segmented.imagenet_segmentation import imagenet_segmentation
from visattn.data.segmented.segmented_photos import SegmentedPhotos
from visattn.errors import ImageError


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
        return imagenet_segmentation(place)
    if is_folder(place / "JPEGImages"):
        return voc(place, split)
    if is_folder(place / "images") and is_folder(place / "annotations"):
        return folders(place, split, background)
    raise ImageError(
        f"{printable(str(place))}: neither gtsegs_ijcv.mat, nor a folder with JPEGImages (VOC), nor one with images and annotations"
    )
