"""The parts of an image: which part each pixel of the input belongs to, and how values of parts become a map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from visattn._support.extras import need
from visattn.errors import OptionError

Parts = Literal["pixels", "grid", "slic"]


@dataclass(frozen=True, eq=False)
class Segments:
    """Which part each pixel of the input belongs to.

    Attributes:
        labels: `(H, W)`, int64, from 0 and without gaps.
        grid: Of the map: the rows and columns of the parts, or `(H, W)` where parts have any shape.
        text: Their kind and number.
    """

    labels: Tensor
    grid: tuple[int, int]
    text: str

    def __len__(self) -> int:
        """Number of parts."""
        return int(self.labels.max()) + 1

    def spread(self, values: Tensor) -> Tensor:
        """`(parts,)` on the map's grid."""
        return values[self.labels] if self.grid == tuple(self.labels.shape) else values.reshape(self.grid)

    def picked(self, pixels: Tensor) -> Tensor:
        """`(parts,)` of pixels `(H, W)` that are alike within each part."""
        return pixels.new_zeros(len(self)).scatter_(0, self.labels.flatten(), pixels.flatten())

    def summed(self, pixels: Tensor) -> Tensor:
        """`(parts,)` of pixels `(H, W)`: the sum of each part."""
        return pixels.new_zeros(len(self)).index_add_(0, self.labels.flatten(), pixels.flatten())


def grid(size: tuple[int, int], rows: int, columns: int) -> Segments:
    """Equal cells, to the nearest pixel.

    Raises:
        OptionError: If there is one cell only, or one would be smaller than a pixel.
    """
    height, width = size
    if not (1 <= rows <= height and 1 <= columns <= width and rows * columns > 1):
        raise OptionError(f"cells must be two or more and no smaller than a pixel of {height} x {width}, got {rows} x {columns}.")
    down, across = torch.arange(height) * rows // height, torch.arange(width) * columns // width
    text = "pixels" if (rows, columns) == size else f"grid {rows} x {columns}"
    return Segments(down[:, None] * columns + across, (rows, columns), text)


def about(size: tuple[int, int], patch: tuple[int, int], count: int) -> tuple[int, int]:
    """Rows and columns of about `count` about-square cells: whole patches where a number nearby divides them, never smaller ones."""
    height, width = size
    wanted = math.sqrt(count * height / width), math.sqrt(count * width / height)
    return _cells(height, patch[0], wanted[0]), _cells(width, patch[1], wanted[1])


def slic(photo: Tensor, count: int) -> Segments:
    """About `count` regions of like color.

    Args:
        photo: `(3, H, W)` in [0, 1], or `(1, H, W)`, which is taken for gray.
        count: How many are asked for; SLIC makes a few more or less.

    Returns:
        The regions.

    Raises:
        OptionError: If SLIC makes only one.
        MissingExtra: If scikit-image is not installed.

    Reference:
        Achanta et al., "SLIC Superpixels Compared to State-of-the-Art Superpixel Methods", TPAMI 2012.
    """
    need("skimage", "attribution", "segments='slic'")
    import skimage.segmentation

    array = photo.expand(3, -1, -1).permute(1, 2, 0).cpu().double().numpy()
    found = skimage.segmentation.slic(array, n_segments=count, channel_axis=-1)
    labels = torch.from_numpy(np.unique(found, return_inverse=True)[1].reshape(found.shape))
    if not labels.any():
        raise OptionError(f"SLIC makes one segment of this image, asked for {count}. Use segments='grid'.")
    return Segments(labels, (labels.shape[0], labels.shape[1]), f"slic {int(labels.max()) + 1}")


def _cells(side: int, patch: int, wanted: float) -> int:
    patches = max(1, side // patch)
    wanted = min(max(wanted, 1), patches)
    if patch == 1:
        return round(wanted)
    whole = [cells for cells in range(1, patches + 1) if patches % cells == 0 and wanted / 1.5 <= cells <= wanted * 1.5]
    return min(whole, key=lambda cells: abs(math.log(cells / wanted)), default=round(wanted))
