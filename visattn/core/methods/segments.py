"""Segments of an image: assignment of input pixels to parts, and conversion between values of parts and maps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from visattn._support.extras import need
from visattn._support.language import option
from visattn.errors import OptionError

Parts = Literal["pixels", "grid", "slic"]


@dataclass(frozen=True, eq=False)
class Segments:
    """Assignment of the input's pixels to parts.

    Attributes:
        labels: `(H, W)` int64 part of each pixel, numbered from 0 without gaps.
        grid: Grid of the map: rows and columns of the parts, or `(H, W)` for parts of any shape.
        text: Kind and number of the parts.
    """

    labels: Tensor
    grid: tuple[int, int]
    text: str

    def __len__(self) -> int:
        """Return the number of parts."""
        return int(self.labels.max()) + 1

    def spread(self, values: Tensor) -> Tensor:
        """Arrange `(parts,)` values on the map's grid."""
        return values[self.labels] if self.grid == tuple(self.labels.shape) else values.reshape(self.grid)

    def picked(self, pixels: Tensor) -> Tensor:
        """Reduce pixels `(H, W)`, which must be constant within each part, to `(parts,)`."""
        return pixels.new_zeros(len(self)).scatter_(0, self.labels.flatten(), pixels.flatten())

    def summed(self, pixels: Tensor) -> Tensor:
        """Sum pixels `(H, W)` over each part, giving `(parts,)`."""
        return pixels.new_zeros(len(self)).index_add_(0, self.labels.flatten(), pixels.flatten())


def grid(size: tuple[int, int], rows: int, columns: int) -> Segments:
    """Divide an image into equal cells, rounded to whole pixels.

    Raises:
        OptionError: If there is only one cell, or cells would be smaller than a pixel.
    """
    height, width = size
    if not (1 <= rows <= height and 1 <= columns <= width and rows * columns > 1):
        raise OptionError(
            f"grid_size must give at least two cells, at most {height} x {width} (one per pixel), got {rows} x {columns}."
        )
    down, across = torch.arange(height) * rows // height, torch.arange(width) * columns // width
    text = "pixels" if (rows, columns) == size else f"grid {rows} x {columns}"
    return Segments(down[:, None] * columns + across, (rows, columns), text)


def about(size: tuple[int, int], patch: tuple[int, int], count: int) -> tuple[int, int]:
    """Return rows and columns of about `count` nearly square cells, no smaller than a patch, of whole patches if possible."""
    height, width = size
    wanted = math.sqrt(count * height / width), math.sqrt(count * width / height)
    return _cells(height, patch[0], wanted[0]), _cells(width, patch[1], wanted[1])


def slic(photo: Tensor, count: int) -> Segments:
    """Divide an image into about `count` regions of similar color.

    Args:
        photo: `(3, H, W)` image in [0, 1], or `(1, H, W)` for gray.
        count: Requested number of regions; SLIC may return a few more or fewer.

    Returns:
        The regions.

    Raises:
        OptionError: If SLIC finds only one region.
        MissingExtra: If scikit-image is not installed.

    Reference:
        Achanta et al., "SLIC Superpixels Compared to State-of-the-Art Superpixel Methods", TPAMI 2012.
    """
    need("skimage", "attribution", option("segments", "slic"))
    import skimage.segmentation

    array = photo.expand(3, -1, -1).permute(1, 2, 0).cpu().double().numpy()
    found = skimage.segmentation.slic(array, n_segments=count, channel_axis=-1)
    labels = torch.from_numpy(np.unique(found, return_inverse=True)[1].reshape(found.shape))
    if not labels.any():
        raise OptionError(f"SLIC found only one segment in this image instead of {count}. Use {option('segments', 'grid')}.")
    return Segments(labels, (labels.shape[0], labels.shape[1]), f"slic {int(labels.max()) + 1}")


def _cells(side: int, patch: int, wanted: float) -> int:
    patches = max(1, side // patch)
    wanted = min(max(wanted, 1), patches)
    if patch == 1:
        return round(wanted)
    whole = [cells for cells in range(1, patches + 1) if patches % cells == 0 and wanted / 1.5 <= cells <= wanted * 1.5]
    return min(whole, key=lambda cells: abs(math.log(cells / wanted)), default=round(wanted))
