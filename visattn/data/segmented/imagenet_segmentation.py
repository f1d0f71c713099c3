"""ImageNet-Segmentation: photos and masks in one file of MATLAB 7.3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visattn._support.checks import first_line, printable
from visattn._support.extras import need
from visattn.data.segmented.segmented_photos import SegmentedPhoto, SegmentedPhotos
from visattn.errors import ImageError


def imagenet_segmentation(path: Path) -> SegmentedPhotos:
    """Return the photos of `gtsegs_ijcv.mat`, with one mask each.

    Raises:
        MissingExtra: If h5py is not installed.
        ImageError: If the file cannot be read.

    Reference:
        Guillaumin et al., "ImageNet Auto-Annotation with Segmentation Propagation", IJCV 2014: 4,276 photos of 445 classes.
    """
    need("h5py", "segmentation", "reading ImageNet-Segmentation")
    import h5py

    def opened() -> Any:  # noqa: ANN401 - h5py has no types
        try:
            return h5py.File(path, "r")
        except OSError as error:
            raise ImageError(
                f"{printable(str(path))}: cannot be read ({first_line(error).rstrip('.')}); pass gtsegs_ijcv.mat"
            ) from error

    with opened() as file:
        if "value/img" not in file or "value/gt" not in file:
            raise ImageError(f"{printable(str(path))}: holds no photos with masks (value/img, value/gt); pass gtsegs_ijcv.mat")
        count = len(file["value/img"])

    def read(number: int) -> SegmentedPhoto:
        try:
            with opened() as file:
                pixels = np.asarray(file[file["value/img"][number, 0]]).transpose()  # MATLAB's order of axes
                mask = np.asarray(file[file[file["value/gt"][number, 0]][0, 0]]).transpose()
        except (KeyError, ValueError, TypeError, IndexError, OSError) as error:
            raise ImageError(f"{printable(str(path))}: photo {number} cannot be read ({first_line(error)})") from error
        if pixels.dtype != np.uint8 or pixels.shape[:2] != mask.shape or mask.ndim != 2:
            raise ImageError(f"{printable(str(path))}: photo {number} and its mask differ: {pixels.shape} and {mask.shape}")
        return SegmentedPhoto(f"photo {number}", Image.fromarray(pixels).convert("RGB"), (mask > 0).astype(np.int64))

    return SegmentedPhotos(tuple(f"photo {number}" for number in range(count)), read)
