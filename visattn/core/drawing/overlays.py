"""Heatmap overlays. Input is a photo and one value per pixel; output is a picture of the same size.

OpenCV does the work on arrays in RGB order (color tables are RGB too, so no channels are swapped). The photo is never rescaled, and
pixels outside the model's input get no color.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import numpy as np
from PIL import Image

from visattn._support.language import option
from visattn._support.notes import warn
from visattn._support.opencv import cv2
from visattn._support.options import with_options
from visattn._support.types import Normalization
from visattn.core.drawing import colormaps
from visattn.core.drawing.layers import layer_between
from visattn.core.drawing.marks import WHITE, inside_only, outline, ring
from visattn.core.drawing.pictures import Picture, carrying, to_png
from visattn.core.drawing.shared_pixels import shared_pixels
from visattn.core.drawing.style import COMPONENTS, Style
from visattn.core.drawing.style_options import ColorOptions
from visattn.core.geometry import Box
from visattn.core.images.sources import as_image
from visattn.core.maps import Heatmap, value_range
from visattn.core.maps.scaling import range_words, resolved, shows_nothing, within
from visattn.core.provenance import Provenance
from visattn.errors import ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["colorize", "on_scale", "overlay", "rgb_components"]

_FLAT = 1e-35  # with a smaller span the float32 scale factor of OpenCV would overflow
_NEARLY = 1e-3  # maps whose relative span is smaller are shifted to zero before scaling
_ROWS = 384  # rows that are mixed at once, so that they stay in the cache of the CPU
_KEPT = 1 << 26  # most bytes of scratch memory that a thread keeps
_NONE = np.empty(0, np.uint8)
_memory = threading.local()
_LINE = 190  # gray level of hatch lines


@with_options(ColorOptions)
def overlay(photo: Any, heat: Heatmap | Any, **style: Unpack[ColorOptions]) -> Picture:  # noqa: ANN401 - anything `as_image` takes
    """Draw a colored heatmap over a photo.

    Args:
        photo: The photo: a PIL image, an array, a tensor, or a source of `visattn.load_image`.
        heat: A `Heatmap` of one panel, or an array `(height, width)` of the photo's size, of any numeric dtype. The color scale of a
            heatmap is computed from its grid. For an array of signed values pass `normalize="symmetric"`, so that zero is the center
            of the scale.
        style: `normalize`, `opacity`, `blend`, `ground`, `colormap`, `contours`, `marks`, `transparent`; see `visattn.drawing.Style`.

    Returns:
        An RGB picture of the photo's size (RGBA with `transparent`), hatched where the model dropped the token. PNG files of it store
        its provenance. For a constant map the photo is returned unchanged, with a warning, except with `normalize="none"`. The same holds
        for a nearly even one, whose range is at most 5 % of its largest value, unless a normalization is chosen: colors would show noise.

    Raises:
        ShapeError: If the heatmap differs from the photo in size, or has several panels.
        MapError: If values are not finite, or lie outside [0, 1] with `normalize="none"`.
        OptionError: If an option is unknown or out of range.
    """
    return painted(photo, heat, Style(**style))


def painted(photo: Any, heat: Heatmap | Any, style: Style, *, quiet: bool = False) -> Picture:  # noqa: ANN401
    """Draw a heatmap over a photo in a given style; see `overlay`. With `quiet`, no warning tells that nothing could be drawn."""
    picture = as_image(photo)
    if style.transparent:
        return layered(picture.size, heat, style, partial(_painted, heat=heat))
    return _painted(picture, heat=heat, style=style, quiet=quiet)


class Draws(Protocol):
    """Function that draws on a background in a style, and warns of what cannot be drawn unless it is to be quiet."""

    def __call__(self, background: Image.Image, /, *, style: Style, quiet: bool = False) -> Picture:
        """Return the picture."""


def layered(size: tuple[int, int], heat: Heatmap | Any, style: Style, draw: Draws) -> Picture:  # noqa: ANN401
    """Draw the layer of a picture: what `draw` puts over any background of this size, with the colors of a heatmap."""
    opaque = replace(style, transparent=False)
    on_black = draw(Image.new("RGB", size), style=opaque)
    on_white = draw(Image.new("RGB", size, WHITE), style=opaque, quiet=True)
    only_colors = replace(opaque, opacity=1, blend="constant", contours=(), marks=False)
    colors = _painted(Image.new("RGB", size), heat=heat, style=only_colors, quiet=True)
    made = on_black.provenance
    layer = layer_between(on_black, on_white, colors, None if style.by_value else style.opacity)
    return carrying(layer, made.but(drawing=made.drawing | {"transparent": True}))


def _painted(picture: Image.Image, /, *, heat: Heatmap | Any, style: Style, quiet: bool = False) -> Picture:  # noqa: ANN401
    normalize, opacity, lines = style.normalize, style.opacity, style.lines
    values, grid, seen = _panel(picture, heat)
    signed = isinstance(heat, Heatmap) and heat.signed
    holed = isinstance(heat, Heatmap) and bool(np.isnan(grid).any())
    scaled = isinstance(heat, Heatmap) and heat.normalized
    if normalize == "auto" and scaled and np.nanmin(grid) < np.nanmax(grid):
        normalize = "none"
    if normalize == "auto":
        normalize = resolved(normalize, grid, signed) if isinstance(heat, Heatmap) else "minmax"
    low, high = value_range(grid, normalize, signed, holes=holed)
    made = heat.provenance if isinstance(heat, Heatmap) else Provenance(method="a map given as an array")
    if not (scaled and normalize == "none"):
        made = made.but(normalization=normalize, value_range=(low, high))
    made = made.but(drawing=made.drawing | style.facts(signed))
    if seen.height == 0 or seen.width == 0:
        if not quiet:
            warn("the model's input contains no pixel of the photo; the photo is unchanged.")
        return carrying(picture.copy(), made)
    if opacity == 0 and not lines:
        return carrying(picture.copy(), made)
    if high - low < _FLAT or shows_nothing(style.normalize, low, high):
        said = _uncolored(low, high)
        if not quiet:
            warn(said)
        return carrying(picture.copy(), made.but(drawing=made.drawing | {"uncolored": said}))
    rows, columns = slice(int(seen.top), int(seen.bottom)), slice(int(seen.left), int(seen.right))
    ground = picture.convert("L").convert("RGB") if style.is_gray else picture
    base = _pixels(ground)
    drawn = Image.new("RGB", picture.size, None)
    memory = shared_pixels(drawn)
    inner, values = base[rows, columns], values[rows, columns]
    holes = np.isnan(values) if holed else None
    values = values if holes is None else np.where(holes, np.float32(low), values)
    if nearly := high - low < _NEARLY * max(abs(low), abs(high)):  # float32 products would lose the differences
        values, low, high = values - np.float32(low), 0.0, high - low
    factor = 255 / (high - low)
    below = nearly or normalize == "percentile"
    mixed = _scratch("mixed", base.shape) if memory is None else memory
    if inner.shape != base.shape:
        np.copyto(mixed, base)
    mix = _mix(style.colors(signed), opacity, style.by_value, signed)
    for start in range(0, len(inner), _ROWS):
        part = slice(start, start + _ROWS)
        levels = _levels(values[part], factor, -low * factor, below)
        mix(inner[part], levels, mixed[rows, columns][part])
    if holes is not None:
        mixed[rows, columns][holes] = _hatch(inner, holes)
    if memory is None:
        drawn.frombytes(mixed, "raw", "RGBX")
    for level in lines:
        mask = np.zeros(base.shape[:2], bool)
        mask[rows, columns] = values >= low + level * (high - low)
        if holes is not None:
            mask[rows, columns] &= ~holes
        drawn = outline(drawn, replace(heat, values=mask.astype(np.float32)) if isinstance(heat, Heatmap) else mask)
    return carrying(inside_only(seen, ringed(drawn, heat, style), ground), made)


def _uncolored(low: float, high: float) -> str:
    """Return why a map is not drawn."""
    if high - low < _FLAT:
        return f"the map is constant ({low:g}); the photo is unchanged."
    return (
        f"the map is nearly even ({range_words(low, high)}); the photo is unchanged. {option('normalize', 'minmax')} colors it."
    )


def on_scale(photo: Image.Image, heat: Heatmap, low: float, high: float, style: Style) -> Picture:
    """Draw a raw heatmap on a color scale from `low` to `high`; the photo is unchanged if that scale shows nothing."""
    if shows_nothing(style.normalize, low, high):
        return carrying(photo.copy(), heat.provenance)
    return painted(photo, within(heat, low, high), replace(style, normalize="none", colormap=style.colors(heat.signed)))


def ringed(picture: Image.Image, heat: Heatmap | Any, style: Style) -> Image.Image:  # noqa: ANN401
    """Draw the rings of a heatmap's sinks and query, unless the style leaves them out."""
    if isinstance(heat, Heatmap) and style.rings:
        return ring(ring(picture, heat.marks), heat.query, WHITE)
    return picture


def colorize(heat: Heatmap | Any, *, normalize: Normalization = "auto", colormap: str | None = None) -> Picture:  # noqa: ANN401
    """Draw only the colors of a heatmap, with black outside the model's input; see `overlay`."""
    values = heat.values if isinstance(heat, Heatmap) else heat
    shape = tuple(values.shape) if hasattr(values, "shape") else np.shape(values)
    return painted(Image.new("RGB", shape[:-3:-1]), heat, Style(normalize=normalize, opacity=1, colormap=colormap))


def png_of(heat: Heatmap) -> bytes | None:
    """Return the colors of a heatmap of one panel for notebooks; the values alone, where they cannot be drawn."""
    return None if heat.axes else to_png(colorize(heat))


def rgb_components(photo: Any, heat: Heatmap, ranges: Sequence[tuple[float, float]] | None = None) -> Picture:  # noqa: ANN401
    """Draw three components as red, green and blue.

    Args:
        photo: The photo; it stays visible outside the model's input.
        heat: A heatmap whose only axis is `component`, of length 3.
        ranges: For each component the raw values that become 0 and 255; by default the 1st and 99th percentile of its grid. Pass the
            ranges of a whole batch to make its pictures comparable.

    Returns:
        An RGB picture of the photo's size.

    Raises:
        ShapeError: If the heatmap has other axes or another size.
    """
    photo = as_image(photo)
    if heat.axes != ("component",) or heat.values.shape != (3, *photo.size[::-1]):
        raise ShapeError(
            f"components must be (3, {photo.height}, {photo.width}), got {heat.axes} {heat.values.shape}. Choose with .at()."
        )
    array = np.array(photo)
    rows, columns = slice(int(heat.seen.top), int(heat.seen.bottom)), slice(int(heat.seen.left), int(heat.seen.right))
    inner, holes = array[rows, columns].copy(), np.isnan(heat.values[0, rows, columns])
    for channel, (values, grid) in enumerate(zip(np.nan_to_num(heat.values), heat.grid, strict=True)):
        low, high = ranges[channel] if ranges is not None else value_range(grid, "percentile", holes=True)
        if high > low:
            array[rows, columns, channel] = ((values[rows, columns] - low) * (255 / (high - low))).clip(0, 255).round()
        else:
            array[rows, columns, channel] = 0
    array[rows, columns][holes] = _hatch(inner, holes)
    how = "percentile of each component" if ranges is None else "the same range for several pictures, each component"
    drawing = {"opacity": COMPONENTS.opacity, "blend": COMPONENTS.blend, "colormap": "components as red, green and blue"}
    return carrying(Image.fromarray(array), heat.provenance.but(normalization=how, drawing=drawing))


def _panel(photo: Image.Image, heat: Any) -> tuple[NDArray[np.float32], NDArray[np.float32], Box]:  # noqa: ANN401
    """Return the values per pixel, the values that determine the color scale, and the box of the model's input."""
    whole = Box(0, 0, photo.height, photo.width)
    if isinstance(heat, Heatmap):
        values, grid, seen = heat.values, heat.grid, heat.seen
        if heat.axes:
            raise ShapeError(
                f"overlay draws one panel, but the heatmap has the axes {heat.axes}. Select one with .at(), or use contact_sheet."
            )
    else:
        if hasattr(heat, "detach"):
            heat = heat.detach().cpu().float()  # numpy has no bfloat16
        array = np.asarray(heat)
        if array.dtype.kind not in "uifb":
            raise ShapeError(f"a heatmap must hold numbers, got {array.dtype}. Pass an (H, W) array.")
        values = array if array.dtype == np.float32 else array.astype(np.float32)
        grid, seen = values, whole
    if values.shape != (photo.height, photo.width):
        raise ShapeError(
            f"a heatmap must be (height, width) = ({photo.height}, {photo.width}) like the photo, got {values.shape}. "
            "Convert a map to pixels with map.to_heatmap(geometry)."
        )
    return values, grid, seen


def _hatch(photo: NDArray[np.uint8], holes: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return the photo's pixels in holes, `(pixels, channels)`, darkened and with diagonal hatch lines."""
    step = max(6, max(holes.shape) // 60)
    y, x = np.nonzero(holes)
    line = ((x + y) % step < max(1, step // 5))[:, None]
    return np.where(line, _LINE, photo[holes] // 3).astype(np.uint8)


def _pixels(picture: Image.Image) -> NDArray[np.uint8]:
    """Return the pixels as `(height, width, 4)`, to be read only; the last channel is padding, for lookups of whole pixels."""
    pixels = shared_pixels(picture)
    if pixels is None:
        pixels = _scratch("pixels", (picture.height, picture.width, 4))
        cv2.cvtColor(np.asarray(picture), cv2.COLOR_RGB2RGBA, pixels)  # quicker than Pillow's own four channels
    return pixels


def _scratch(name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return memory that the next call of this thread uses again: allocating it costs more than the mixing. Its content is undefined."""
    size = math.prod(shape)
    if size > _KEPT:
        return np.empty(shape, np.uint8)
    if getattr(_memory, name, _NONE).size < size:
        setattr(_memory, name, np.empty(size, np.uint8))
    made: NDArray[np.uint8] = getattr(_memory, name)[:size].reshape(shape)
    return made


def _levels(values: NDArray[np.float32], factor: float, offset: float, below: bool) -> NDArray[np.uint8]:
    """Return `factor * values + offset`, rounded and clipped to 0 and 255."""
    if below:  # `convertScaleAbs` is quicker, but mirrors values below 0
        clipped: NDArray[np.uint8] = cv2.addWeighted(values, factor, values, 0, offset, dtype=cv2.CV_8U)
        return clipped
    scaled: NDArray[np.uint8] = cv2.convertScaleAbs(values, alpha=factor, beta=offset)
    return scaled


class _Mix:
    """Mixing of pixels and colors. Four channels are packed into one integer: one lookup per pixel is faster than one per channel."""

    def __init__(self, colormap: str, opacity: float, by_value: bool, signed: bool) -> None:
        """Compute the tables for all 256 levels."""
        self._opacity, self._by_value = opacity, by_value
        ramp = np.linspace(0, 1, 256)[:, None]
        share = opacity * (np.abs(2 * ramp - 1) if signed else ramp) if by_value else np.ones((256, 1))
        self._colors = _packed(np.pad(colormaps.table(colormap), ((0, 0), (0, 1))) * share)
        self._rest = _packed(np.repeat(255 * (1 - share), 4, axis=1))

    def __call__(self, pixels: NDArray[np.uint8], levels: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Write the mixed pixels, `(rows, columns, 4)`, to `out`."""
        cv2.LUT(levels, self._colors, out.view(np.int32)[..., 0])
        if not self._by_value:
            cv2.addWeighted(out, self._opacity, pixels, 1 - self._opacity, 0, out)
            return
        rest = _scratch("rest", pixels.shape)
        cv2.LUT(levels, self._rest, rest.view(np.int32)[..., 0])
        cv2.add(out, cv2.multiply(pixels, rest, rest, 1 / 255), out)


_mix = lru_cache(maxsize=64)(_Mix)  # a quarter of the time of a small picture


def _packed(table: NDArray[np.floating]) -> NDArray[np.int32]:
    return np.ascontiguousarray(table.round().astype(np.uint8)).view(np.int32).reshape(1, 256)
