"""Images of more than three channels (multispectral, RGB-D): the channels for the model, and an RGB image to draw on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from visattn._support.language import worded
from visattn._support.reprs import brief
from visattn.core.images.loading import as_array, as_photo
from visattn.errors import ImageError, OptionError, UnsupportedModel


@dataclass(frozen=True, eq=False)
class Bands:
    """An image of any number of channels.

    Attributes:
        channels: Each channel as an image of mode `F`, 0 to 255.
        photo: RGB image of three of the channels, to draw on.
    """

    channels: tuple[Image.Image, ...]
    photo: Image.Image

    __repr__ = brief

    @property
    def height(self) -> int:
        """Height in pixels."""
        return self.photo.height

    @property
    def width(self) -> int:
        """Width in pixels."""
        return self.photo.width


def bands_of(image: Any, count: int, rgb: Sequence[int] | None = None) -> Bands:  # noqa: ANN401 - arrays and tensors of any library
    """Split an array into its channels.

    Args:
        image: `(H, W, C)` or `(C, H, W)`; its dtype decides the range, as in `as_photo`.
        count: The number of channels C.
        rgb: Indices of the channels shown as red, green and blue; the first three by default.

    Returns:
        The channels and the RGB image.

    Raises:
        ImageError: If the array has another number of channels, or values outside the range of its dtype.
        UnsupportedModel: If `image` is a PIL image.
        OptionError: If `rgb` is not three valid channel indices.
    """
    if isinstance(image, Image.Image):
        raise UnsupportedModel(
            f"the model takes {count} channels, got an image of mode {image.mode}. "
            + worded(f"Pass an array (H, W, {count}) or ({count}, H, W) to visattn.explain.", "Choose another model.")
        )
    chosen = tuple(min(channel, count - 1) for channel in range(3)) if rgb is None else tuple(rgb)
    if len(chosen) != 3 or not all(isinstance(channel, int) and 0 <= channel < count for channel in chosen):
        raise OptionError(f"rgb must be three channels from 0 to {count - 1}, got {chosen}.")
    values = as_array(image)
    if values.ndim == 3 and values.shape[2] != count and values.shape[0] == count:
        values = values.transpose(1, 2, 0)
    if values.ndim != 3 or values.shape[2] != count or not values.size:
        raise ImageError(
            f"the model takes {count} channels, got {values.shape}. Pass an array (H, W, {count}) or ({count}, H, W)."
        )
    channels = [np.ascontiguousarray(values[..., channel], np.float32) for channel in range(count)]
    shown = np.stack([channels[channel] for channel in chosen], -1).round().astype(np.uint8)
    return Bands(tuple(map(Image.fromarray, channels)), as_photo(shown))
