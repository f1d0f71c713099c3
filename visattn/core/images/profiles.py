"""Conversion of colors to sRGB with the ICC profile of a file."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
from PIL import Image, ImageCms

from visattn._support.checks import printable
from visattn.core.images.gray import narrow

__all__ = ["to_srgb"]

_MODES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}  # color space of a profile -> Pillow mode
_KINDS = {"1": "GRAY", "L": "GRAY", "I;16": "GRAY", "CMYK": "CMYK"}  # Pillow mode -> color space; RGB for all other modes
_STEPS = 9  # values per channel at which a profile is compared with sRGB


def to_srgb(image: Image.Image, profile: bytes, notes: list[str]) -> Image.Image:
    """Convert an image to sRGB with littleCMS: relative colorimetric, without black point compensation.

    Args:
        image: Image without alpha; wide gray must be `I;16` that uses its full range.
        profile: Content of an ICC profile.
        notes: List to which a note about the conversion is appended.

    Returns:
        An image of mode RGB; `image` itself if the profile is sRGB, is for another color space, or cannot be read.
    """
    pixels, space = _KINDS.get(image.mode, "RGB "), profile[16:20].decode("latin-1")
    if space != pixels and not (space == "RGB " and pixels == "GRAY"):
        notes.append(f"its color profile is for {printable(space.strip())}, its pixels are {pixels.strip()}; taken as sRGB")
        return image
    try:
        name, convert = _conversion(profile, "I;16" if image.mode == "I;16" and space == "GRAY" else _MODES[space])
    except Exception:  # a broken profile can raise anything; the pixels are intact
        notes.append("its color profile cannot be read; taken as sRGB")
        return image
    if convert is None:
        return image
    notes.append(f"colors converted from {name} to sRGB")
    return convert(image)


@lru_cache(maxsize=8)
def _conversion(profile: bytes, mode: str) -> tuple[str, Callable[[Image.Image], Image.Image] | None]:
    """Return the profile's name and its conversion to sRGB; None instead of the conversion if no color changes by more than one level."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    name = printable(" ".join(ImageCms.getProfileDescription(source).split()))[:60] or "an unnamed profile"
    transform = ImageCms.buildTransform(
        source,
        ImageCms.createProfile("sRGB"),
        mode,
        "RGB",
        renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
        flags=ImageCms.Flags.NONE if mode in ("RGB", "CMYK") else ImageCms.Flags.NOOPTIMIZE,
    )
    if mode == "RGB":
        steps = np.linspace(0, 255, _STEPS).round().astype(np.uint8)
        colors = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(_STEPS, -1, 3)
        moved = np.asarray(transform.apply(Image.fromarray(colors))).astype(int) - colors
        return name, None if np.abs(moved).max() <= 1 else partial(_transformed, transform)
    if mode == "CMYK":
        return name, partial(_transformed, transform)
    kind = np.dtype(np.uint16 if mode == "I;16" else np.uint8)  # for gray, a lookup table is exact and faster
    table = np.asarray(transform.apply(Image.fromarray(np.arange(2 ** (8 * kind.itemsize), dtype=kind)[None])))[0]
    return name, lambda image: Image.fromarray(table[np.asarray(image.convert(mode) if image.mode != mode else image)])


def _transformed(transform: ImageCms.ImageCmsTransform, image: Image.Image) -> Image.Image:
    if image.mode == "I;16":
        image = narrow(image)
    found: Image.Image = transform.apply(image if image.mode == transform.input_mode else image.convert(transform.input_mode))
    return found
