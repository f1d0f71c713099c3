"""Names and types of the options of pictures; `Style` has their meaning and their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from visattn._support.types import Blend, Colormap, Ground, Interpolation, Normalization

__all__ = ["PAGE", "ColorOptions", "PageOptions", "StyleOptions"]


class ColorOptions(TypedDict, total=False):
    """Options for maps that are already in pixels; see `Style`."""

    normalize: Normalization
    opacity: float
    blend: Blend
    ground: Ground
    colormap: Colormap | None
    contours: Sequence[float] | float
    marks: bool
    transparent: bool


class StyleOptions(ColorOptions, total=False):
    """Options for maps that are interpolated to pixels first; see `Style`."""

    interpolation: Interpolation


class PageOptions(StyleOptions, total=False):
    """Options of a figure of panels."""

    panel: int


PAGE: StyleOptions = {"opacity": 0.6, "blend": "constant", "interpolation": "nearest"}  # small panels show every patch
