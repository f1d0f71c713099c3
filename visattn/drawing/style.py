"""How values become colors: one record that every drawing function takes and every picture's provenance names.

An option is a field of `Style`, a key of `ColorOptions` and its use in `overlays`; commands and pages then have it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, get_args

import numpy as np

from visattn._support.checks import between, one_of
from visattn._support.options import option
from visattn._support.types import Blend, Interpolation, Normalization
from visattn.drawing import colormaps


class ColorOptions(TypedDict, total=False):
    """Options of what has pixels already; see `Style`."""

    normalize: Normalization
    opacity: float
    blend: Blend
    colormap: str | None
    contours: Sequence[float] | float
    marks: bool


class StyleOptions(ColorOptions, total=False):
    """Options of what is brought to pixels first; see `Style`."""

    interpolation: Interpolation


class PageOptions(StyleOptions, total=False):
    """Options of a page of panels."""

    panel: int


PAGE: StyleOptions = {"opacity": 0.6, "interpolation": "nearest"}  # of panels, where a patch should be seen as it is


@dataclass(frozen=True)
class Style:
    """How values become colors.

    Attributes:
        normalize: How values become 0 to 1, see `visattn.maps.value_range`. `auto` leaves a heatmap that `normalize` has scaled; it is
            symmetric for signed values and minmax for others.
        opacity: 0 gives the photo's bytes, 1 the color map.
        blend: `constant` mixes every pixel alike; `value` lets high values cover and low ones show the photo.
        colormap: A name of `colormaps.NAMES`; inferno, or blue-white-red where values are signed or normalized symmetrically, by
            default.
        contours: Levels in [0, 1] at which lines are drawn, or one.
        marks: Whether to ring the sinks of a heatmap (never at opacity 0 or 1, whose pixels are exact).
        interpolation: Between cells, see `AttentionMap.to_heatmap`.

    Raises:
        OptionError: If an option is unknown or out of range.
    """

    normalize: Normalization = option("auto", "How values become 0 to 1.")
    opacity: float = option(0.5, "0: the photo, 1: the colors.")
    blend: Blend = option("constant", "value: high values cover, low ones show the photo.")
    colormap: str | None = option(
        None, "A name that visattn list (--colormaps) prints; inferno, or blue-white-red for signed values.", metavar="NAME"
    )
    contours: Sequence[float] | float = option(
        (), "Draw a line at this level from 0 to 1; may be given several times.", metavar="LEVEL"
    )
    marks: bool = option(True, "Whether sinks are ringed.")
    interpolation: Interpolation = option("bilinear", "Between cells.")

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            OptionError: If one is unknown or out of range.
        """
        one_of(self.normalize, get_args(Normalization), "normalization")
        object.__setattr__(self, "opacity", between(self.opacity, 0, 1, "opacity"))
        one_of(self.blend, get_args(Blend), "blend")
        if self.colormap is not None:
            one_of(self.colormap, colormaps.NAMES, "colormap")
        lines = tuple(between(level, 0, 1, "contour level") for level in self.lines)
        object.__setattr__(self, "contours", lines)
        one_of(self.interpolation, get_args(Interpolation), "interpolation")

    @property
    def lines(self) -> list[float]:
        """The levels of the contours."""
        levels: list[float] = np.ravel(self.contours).tolist()  # arrays of any type, and a number alone
        return levels

    def scale(self, signed: bool) -> Normalization:
        """The normalization that `auto` stands for."""
        return self.normalize if self.normalize != "auto" else "symmetric" if signed else "minmax"

    def colors(self, signed: bool) -> str:
        """The name of the color map for values of which zero is one of their own, or is not."""
        return self.colormap or ("blue-white-red" if signed or self.normalize == "symmetric" else "inferno")

    def facts(self, signed: bool) -> dict[str, Any]:
        """Plain values for provenance; normalization and interpolation stand there by themselves."""
        made = asdict(self) | {"colormap": self.colors(signed), "contours": self.lines}
        return {name: value for name, value in made.items() if name not in ("normalize", "interpolation")}
