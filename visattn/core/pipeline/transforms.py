"""Inputs made by any transform: a torchvision or open_clip transform, an image processor of Hugging Face, a function of yours.

The part of the photo that the input shows is measured, not read from settings: the transform is also applied to images of the photo's
size whose brightness rises from left to right and from top to bottom, so each input pixel tells where it came from. A transform that
is no crop, resize and padding with a linear normalization is refused. At the end the input is compared with that part of the photo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, max_pool2d

from visattn._support.checks import first_line
from visattn.core.geometry import Box, Geometry
from visattn.errors import OptionError

RULE = "measured: the transform applied to brightness ramps"
_SMALLEST = 8  # side of a photo in pixels, below which ramps have too few steps
_EDGE = 2  # input pixels at each border that interpolation may change
_REFUSED = "so the map cannot be placed on the photo. Pass pixels= and the picture that they show."
ALIKE = 0.985  # on natural photos the whole correlates above 0.99 with any interpolation, a crop of 95 % below 0.98
_SMALL = 64  # side in pixels at which input and photo are compared
_LINEAR = 0.02  # largest deviation of a gray value from the line through black and white, as a share of their distance


class Transformed(NamedTuple):
    """Input that a transform made of one photo.

    Attributes:
        pixels: `(C, H, W)`.
        geometry: Position of the input on the photo.
        mean: Mean of each channel of the normalization, for pixels in [0, 1].
        std: Standard deviation of each channel.
    """

    pixels: Tensor
    geometry: Geometry
    mean: tuple[float, ...]
    std: tuple[float, ...]


def transformed(photo: Image.Image, transform: Callable[..., Any]) -> Transformed:
    """Apply a transform to a photo, and measure its normalization and which part of the photo it shows.

    Args:
        photo: RGB photo.
        transform: Function from a PIL image to a tensor `(C, H, W)` or `(1, C, H, W)`; an image processor of Hugging Face; or the weights
            of a torchvision model, whose transform is taken.

    Returns:
        The input and its facts.

    Raises:
        OptionError: If the transform fails, is random, or is no crop, resize and padding with a linear normalization.
    """
    if hasattr(transform, "url") and hasattr(transform, "transforms"):  # weights of torchvision
        transform = transform.transforms()
    width, height = photo.size
    if min(width, height) < _SMALLEST:
        raise OptionError(f"a transform cannot be measured on a photo of {width} x {height} pixels. Leave transform out.")
    pixels = _applied(transform, photo)
    if not torch.equal(pixels, _applied(transform, photo)):
        raise OptionError("transform gives another result each time, so it is random. Pass the one for evaluation.")
    black, gray, white = (_applied(transform, Image.new("RGB", photo.size, (level,) * 3)).double() for level in (0, 128, 255))
    inside = (black != white).all(0)  # the rest is padding
    if not bool(inside.any()):
        raise OptionError("transform gives the same result for a black and a white image. Pass one that keeps the image.")
    low, high = black[:, inside].median(1).values, white[:, inside].median(1).values
    span = (high - low)[:, None, None].abs()
    pure = ((black - low[:, None, None]).abs() < _LINEAR * span) & ((white - high[:, None, None]).abs() < _LINEAR * span)
    mixed = (~(inside & pure.all(0))).float()[None]
    inside = max_pool2d(mixed, 3, stride=1, padding=1)[0] == 0  # interpolation mixes the photo's border with padding
    if not bool(inside.any()):
        raise OptionError(f"transform changes brightness from place to place, {_REFUSED}")
    middle = (gray[:, inside].median(1).values - low) / (high - low)
    if float((middle - 128 / 255).abs().max()) > _LINEAR:
        raise OptionError(
            "transform changes brightness in a nonlinear way, so its normalization cannot be stated. Pass pixels= instead."
        )
    extents = [_extent(transform, photo.size, axis, low, high, inside) for axis in (0, 1)]
    (top, bottom), (left, right) = extents
    std = 1 / (high - low)
    geometry = Geometry((height, width), (pixels.shape[1], pixels.shape[2]), Box(top, left, bottom, right), RULE)
    if likeness(pixels, photo, geometry) < ALIKE:  # it cropped the ramps elsewhere
        raise OptionError(f"transform depends on what the photo shows, {_REFUSED}")
    return Transformed(pixels.float(), geometry, tuple((-low * std).tolist()), tuple(std.tolist()))


def likeness(pixels: Tensor, photo: Image.Image, geometry: Geometry) -> float:
    """Return the correlation of an input `(C, H, W)` with the part of the photo that it is said to show, both made small.

    It is the largest over pairs of an input channel and a channel of the photo (red, green, blue or luminance). It is 1 if one of the
    two is constant or nothing is left to compare. Crops, flips and shifts lower it.
    """
    (height, width), sides = geometry.photo, geometry.input
    first, last = geometry.to_input(0, 0), geometry.to_input(height, width)
    # one pixel less at each border, where interpolation mixes photo and padding
    top, left = (max(math.ceil(at) + 1, 0) for at in first)
    bottom, right = (min(math.floor(at) - 1, side) for at, side in zip(last, sides, strict=True))
    if bottom <= top or right <= left:
        return 1.0
    part = geometry.box_to_photo(Box(top, left, bottom, right)).intersect(Box(0, 0, height, width))
    inside = pixels.detach().float().cpu()[None, :, top:bottom, left:right]
    rows, columns = (min(_SMALL, side) for side in inside.shape[2:])
    small = interpolate(inside, (rows, columns), mode="bilinear", antialias=True)[0].double()
    shrunk = photo.convert("RGB").resize(
        (columns, rows), Image.Resampling.BILINEAR, (part.left, part.top, part.right, part.bottom)
    )
    seen = [torch.from_numpy(np.asarray(band).copy()).double() for band in (*shrunk.split(), shrunk.convert("L"))]
    return max(_correlation(channel, band) for channel in small for band in seen)


def _correlation(one: Tensor, other: Tensor) -> float:
    """Compute the correlation of two images; 1 if one of them is constant."""
    one, other = one - one.mean(), other - other.mean()
    norm = float(one.norm() * other.norm())
    return float((one * other).sum()) / norm if norm > 0 else 1.0


def _extent(
    transform: Callable[..., Any], size: tuple[int, int], axis: int, low: Tensor, high: Tensor, inside: Tensor
) -> tuple[float, float]:
    """Return the first and last photo coordinate along an axis (0: y, 1: x) that the input shows.

    Raises:
        OptionError: If input pixels do not advance along the photo in equal steps.
    """
    length = size[1 - axis]
    ramp = np.linspace(0, 255, length).round().astype(np.uint8)
    levels = np.broadcast_to(ramp[:, None] if axis == 0 else ramp, size[::-1])
    seen = _applied(transform, Image.fromarray(np.ascontiguousarray(levels)).convert("RGB")).double()
    share = ((seen - low[:, None, None]) / (high - low)[:, None, None]).mean(0)
    position = share * (length - 1) + 0.5  # photo coordinate of each input pixel's center
    steps = torch.arange(share.shape[axis], dtype=torch.float64) + 0.5
    along = (steps[:, None] if axis == 0 else steps[None]).expand_as(share)
    used = inside & (share > 2 / 255) & (share < 253 / 255)
    used = used & (along > _EDGE) & (along < len(steps) - _EDGE)
    if int(used.sum()) < 2 or float(along[used].max() - along[used].min()) < 1:
        raise OptionError(f"transform shows too small a part of the photo, {_REFUSED}")
    scale, start = _line(along[used].numpy(), position[used].numpy())
    error = float((along[used] * scale + start - position[used]).abs().max())
    if scale <= 0 or error > 1.5 * length / 255 + 1.5 * max(scale, 1):
        what = "mirrors the photo" if scale < 0 and error < length / 50 else "is no crop and resize"
        raise OptionError(f"transform {what}, {_REFUSED}")
    first, last = start, start + scale * len(steps)
    tolerance = 0.3 * max(scale, length / 255)  # accuracy of the measurement
    return (0.0 if abs(first) < tolerance else first), (float(length) if abs(last - length) < tolerance else last)


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Fit a line by least squares; return its factor and its value at 0."""
    factor, start = np.polyfit(x, y, 1)
    return float(factor), float(start)


def _applied(transform: Callable[..., Any], image: Image.Image) -> Tensor:
    """Apply a transform to an image.

    Raises:
        OptionError: If it fails, or does not return one image.
    """
    try:
        if hasattr(transform, "image_mean") or hasattr(transform, "image_processor"):  # Hugging Face
            pixels = transform(images=image, return_tensors="pt")
        else:
            pixels = transform(image)
    except Exception as error:  # a user's function may raise anything
        raise OptionError(
            f"transform fails for a photo of {image.width} x {image.height} pixels: {type(error).__name__}: {first_line(error)}. "
            "It must take a PIL image."
        ) from error
    if isinstance(pixels, Mapping):
        pixels = pixels.get("pixel_values", pixels.get("image"))
    pixels = torch.from_numpy(pixels) if isinstance(pixels, np.ndarray) else pixels
    if isinstance(pixels, Tensor) and pixels.ndim == 4 and len(pixels) == 1:
        pixels = pixels[0]
    if not isinstance(pixels, Tensor) or pixels.ndim != 3 or not pixels.is_floating_point():
        got = f"{pixels.dtype} {tuple(pixels.shape)}" if isinstance(pixels, Tensor) else type(pixels).__name__
        raise OptionError(f"transform must return floats (C, H, W), got {got}. Add torchvision.transforms.ToTensor().")
    return pixels.detach().cpu()
