"""Gray images with more than 8 bits per sample, or with signed or floating-point samples, scaled to 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT

from visattn.errors import ImageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIGNED = 2
_WIDE = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")


@dataclass(frozen=True)
class Samples:
    """Sample format of a gray image, as declared in its file.

    Attributes:
        bits: Bits per sample.
        format: 1 unsigned, 2 signed, 3 floating-point, as in TIFF.
        white_is_zero: Whether small values are bright.
    """

    bits: int
    format: int
    white_is_zero: bool


def stated(image: Image.Image) -> Samples | None:
    """Return the sample format declared in the tags of a TIFF; None for other formats."""
    tags = getattr(image, "tag_v2", None)
    if tags is None:
        return None
    return Samples(tags.get(BITSPERSAMPLE, (1,))[0], tags.get(SAMPLEFORMAT, (1,))[0], tags.get(PHOTOMETRIC_INTERPRETATION) == 0)


def is_wide(image: Image.Image, samples: Samples | None) -> bool:
    """Check whether Pillow's own conversion of a gray image to 8 bits would misread its values."""
    return image.mode in _WIDE or (image.mode == "L" and samples is not None and samples.format == _SIGNED)


def spread(image: Image.Image, samples: Samples | None, notes: list[str]) -> Image.Image:
    """Scale wide gray to `I;16`, with black at 0 and white at 65535.

    Unsigned samples of up to 16 bits are scaled by the range of their bits. All others have no defined black and white, so they are scaled
    by their own minimum and maximum.

    Args:
        image: Image for which `is_wide` is true.
        samples: Sample format declared in the file.
        notes: List to which a note about the scaling is appended.

    Raises:
        ImageError: If samples are NaN or infinite.
    """
    values = np.asarray(image)
    if samples is not None and samples.format == _SIGNED and samples.bits == 8:
        values = values.view(np.int8)  # Pillow reads signed 8-bit samples as unsigned
    elif samples is not None and samples.format == 1 and samples.bits == 32:
        values = values.view(np.uint32)  # and unsigned 32-bit samples as signed
    if bad := int((~np.isfinite(values)).sum()):
        raise ImageError(f"the image has {bad} NaN or infinite pixels; replace them")
    low, high = values.min().item(), values.max().item()
    if samples is None and image.mode != "F" and low >= 0 and high < 2**16:
        samples = Samples(16, 1, white_is_zero=False)
    if samples is not None and samples.format == 1 and samples.bits <= 16:
        black, white = 0, 2**samples.bits - 1
        notes.append(f"{samples.bits}-bit gray, 0 to {white} shown as 0 to 255; the largest is {high}")
    else:
        black, white = low, high
        notes.append(f"gray values {low:g} to {high:g} shown as 0 to 255")
    if samples is not None and samples.white_is_zero:
        black, white = white, black
        notes.append("gray inverted: in this file white is zero")
    scaled: NDArray[Any] = (values.astype(np.float64) - black) * (65535 / ((white - black) or 1))
    return Image.fromarray(scaled.round().clip(0, 65535).astype(np.uint16))


def narrow(image: Image.Image) -> Image.Image:
    """Convert `I;16` that uses its full range to `L`."""
    return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
