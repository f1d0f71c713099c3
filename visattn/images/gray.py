"""Gray of more than 8 bits, or of signed or real numbers, whose black and white its file states."""

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
    """What a file states of its gray.

    Attributes:
        bits: Of a sample.
        format: 1 unsigned, 2 signed, 3 real, as in TIFF.
        white_is_zero: Whether small values are bright.
    """

    bits: int
    format: int
    white_is_zero: bool


def stated(image: Image.Image) -> Samples | None:
    """Return what the tags of a TIFF state of its samples; None for other formats."""
    tags = getattr(image, "tag_v2", None)
    if tags is None:
        return None
    return Samples(tags.get(BITSPERSAMPLE, (1,))[0], tags.get(SAMPLEFORMAT, (1,))[0], tags.get(PHOTOMETRIC_INTERPRETATION) == 0)


def is_wide(image: Image.Image, samples: Samples | None) -> bool:
    """Return whether Pillow's own conversion to 8 bits would misread the gray of a picture."""
    return image.mode in _WIDE or (image.mode == "L" and samples is not None and samples.format == _SIGNED)


def spread(image: Image.Image, samples: Samples | None, notes: list[str]) -> Image.Image:
    """Return wide gray as `I;16` from black, 0, to white, 65535.

    Unsigned samples of up to 16 bits keep the range of their bits. Others have no black and no white of their own: their smallest
    value becomes one, their largest the other.

    Args:
        image: A picture for which `is_wide` holds.
        samples: What its file states of it.
        notes: The rule is added.

    Raises:
        ImageError: If samples are NaN or infinite.
    """
    values = np.asarray(image)
    if samples is not None and samples.format == _SIGNED and samples.bits == 8:
        values = values.view(np.int8)  # Pillow reads them as unsigned
    elif samples is not None and samples.format == 1 and samples.bits == 32:
        values = values.view(np.uint32)  # and these as signed
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
        notes.append("white is zero in it")
    scaled: NDArray[Any] = (values.astype(np.float64) - black) * (65535 / ((white - black) or 1))
    return Image.fromarray(scaled.round().clip(0, 65535).astype(np.uint16))


def narrow(image: Image.Image) -> Image.Image:
    """Return `I;16` that uses its whole range as `L`."""
    return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
