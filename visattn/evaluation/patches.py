"""Properties of the patches of an image: position, mean color, and share of an object."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from visattn.core.geometry import Geometry
from visattn.core.records import TokenLayout
from visattn.errors import ShapeError

Content = Literal["hue", "brightness", "object"]
CONTENTS: tuple[Content, ...] = get_args(Content)


class Patches(NamedTuple):
    """Properties of the patches of one image, each `(rows, columns)`.

    Attributes:
        color: `(rows, columns, 3)` mean sRGB color, from 0 to 1.
        object: Share of the patch that the object covers; None without a mask.
    """

    color: NDArray[np.float64]
    object: NDArray[np.float64] | None

    @property
    def brightness(self) -> NDArray[np.float64]:
        """Luma of the mean color, ITU-R 601, from 0 to 1."""
        luma: NDArray[np.float64] = self.color @ np.array([0.299, 0.587, 0.114])
        return luma

    @property
    def hue(self) -> NDArray[np.complex128]:
        """Chroma times `exp(i hue)` of the mean color: a gray patch has no hue, so it counts little. Hue is that of HSV."""
        red, green, blue = np.moveaxis(self.color, -1, 0)
        high, low = self.color.max(-1), self.color.min(-1)
        chroma = high - low
        part = np.where(chroma > 0, chroma, 1)
        sixth = np.select(
            [high == red, high == green], [(green - blue) / part, 2 + (blue - red) / part], 4 + (red - green) / part
        )
        turned: NDArray[np.complex128] = chroma * np.exp(1j * math.pi / 3 * sixth)
        return turned

    def content(self) -> dict[Content, Tensor]:
        """Return what depends on the image's content, each `(rows, columns)`; `hue` is complex."""
        found: dict[Content, Tensor] = {"hue": torch.from_numpy(self.hue), "brightness": torch.from_numpy(self.brightness)}
        return found if self.object is None else found | {"object": torch.from_numpy(self.object)}


def patches_of(photo: Image.Image, geometry: Geometry, layout: TokenLayout, mask: NDArray[np.bool_] | None = None) -> Patches:
    """Average a photo, and a mask of an object on it, over each patch.

    Args:
        photo: The upright RGB photo.
        geometry: Its place in the model's input.
        layout: Tokens on a grid of rows and columns.
        mask: Pixels of the object, of the photo's size.

    Returns:
        The properties. What lies outside the photo is black, as the model sees it, and no object.

    Raises:
        ShapeError: If the mask is not of the photo's size, or the tokens lie on no grid.
    """
    if len(layout.grid) != 2:
        raise ShapeError(f"tokens must lie on a grid of rows and columns, got {layout.grid}.")
    if mask is not None and (mask.ndim != 2 or mask.shape != (photo.height, photo.width)):
        raise ShapeError(f"the mask must be of the photo's size ({photo.height}, {photo.width}), got {mask.shape}.")
    box = geometry.box_to_photo(layout.box)
    down, across = (_shares(box[axis], box[axis + 2], layout.grid[axis], size) for axis, size in enumerate(geometry.photo))

    def mean(values: NDArray[Any]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.einsum("rh,hw...,cw->rc...", down, values, across, optimize=True)
        return found

    color = mean(np.asarray(photo.convert("RGB"), np.float64) / 255)
    return Patches(color, None if mask is None else mean(mask.astype(np.float64)))


def patches_by_layout(
    photo: Image.Image, geometry: Geometry, mask: NDArray[np.bool_] | None = None
) -> Callable[[TokenLayout], Patches]:
    """Return a function from a layout to `patches_of` it, which averages the photo once for layers with the same layout."""
    return cache(lambda layout: patches_of(photo, geometry, layout, mask))


def _shares(start: float, end: float, cells: int, pixels: int) -> NDArray[np.float64]:
    """Return the share of each cell's length `(cells, pixels)` that each pixel covers."""
    edges, at = np.linspace(start, end, cells + 1)[:, None], np.arange(pixels)
    covered = np.minimum(edges[1:], at + 1) - np.maximum(edges[:-1], at)
    shares: NDArray[np.float64] = covered.clip(0) * cells / (end - start)
    return shares
