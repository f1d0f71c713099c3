"""Options that turn values into colors. All drawing functions take them, and every picture's provenance stores them.

To add an option, add a field to `Style` and a key to `ColorOptions` (`options`), and use it in `overlays`. Commands and figures then
have it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np

from visattn._support.checks import between, one_of
from visattn._support.options import option
from visattn._support.types import Blend, Ground, Interpolation, Normalization
from visattn.core.drawing import colormaps
from visattn.errors import OptionError

__all__ = ["COMPONENTS", "Style"]


@dataclass(frozen=True)
class Style:
    """Options that turn values into colors.

    Attributes:
        normalize: Scaling of values to [0, 1], see `visattn.maps.value_range`. `auto` is symmetric for signed values, percentile for
            sparse maps and minmax for others; a heatmap that `visattn.normalize` has scaled stays unchanged.
        opacity: Weight of the colors: 0 returns the photo's own pixels, 1 only the colors.
        blend: `value` multiplies the opacity by the value, so colors cover only what the map marks; of a signed map, by its magnitude.
            `constant` uses the same opacity for every pixel. `auto` is value, but constant at opacity 1.
        ground: What the colors lie on: the `photo`, or the `gray` photo, on which no color of the photo can be taken for one of the
            map. `auto` is gray where colors are blended by value. At opacity 0 it is always the photo.
        colormap: Name from `colormaps.NAMES`. The default is inferno, or blue-white-red if values are signed or normalized
            symmetrically.
        contours: Level in [0, 1] at which a contour line is drawn, or several levels.
        marks: Whether to draw rings: cyan around attention sinks, white around the query. At opacity 0 or 1 they are never drawn, so that
            pixels are exact.
        transparent: Whether to draw the layer alone, without the photo: an RGBA picture of the photo's size, transparent where the
            photo would show. Laid over the ground it gives the picture to a level or two of 255. For one picture: figures of panels
            and films have no transparency.
        interpolation: Interpolation between cells, see `AttentionMap.to_heatmap`.

    Raises:
        OptionError: If an option is unknown or out of range.
    """

    normalize: Normalization = option("auto", "Scaling of the map's values to the range 0 to 1.")
    opacity: float = option(0.8, "Weight of the colors: 0 shows only the photo, 1 only the colors.")
    blend: Blend = option(
        "auto",
        "Mixing of photo and colors: value (low values are more transparent) or constant (same opacity everywhere); auto: value, but "
        "constant at opacity 1.",
    )
    ground: Ground = option(
        "auto", "What the colors lie on: the photo, or the gray photo; auto: gray where low values are more transparent."
    )
    colormap: str | None = option(
        None,
        "Name of the color map (`visattn list --colormaps` prints them). Default: inferno, or blue-white-red for signed values.",
        metavar="NAME",
    )
    contours: Sequence[float] | float = option(
        (), "Draw a contour line at this level, from 0 to 1. Can be given several times.", metavar="LEVEL"
    )
    marks: bool = option(True, "Draw rings around attention sinks and the query.")
    transparent: bool = option(False, "Draw the colors and marks alone, on a transparent ground of the photo's size.")
    interpolation: Interpolation = option("bilinear", "Interpolation between the cells of the map.")

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            OptionError: If an option is unknown or out of range.
        """
        one_of(self.normalize, get_args(Normalization), "normalization")
        object.__setattr__(self, "opacity", between(self.opacity, 0, 1, "opacity"))
        one_of(self.blend, get_args(Blend), "blend")
        one_of(self.ground, get_args(Ground), "ground")
        if self.colormap is not None:
            one_of(self.colormap, colormaps.NAMES, "colormap")
        lines = tuple(between(level, 0, 1, "contour level") for level in self.lines)
        object.__setattr__(self, "contours", lines)
        one_of(self.interpolation, get_args(Interpolation), "interpolation")

    @property
    def lines(self) -> list[float]:
        """Levels of the contour lines."""
        levels: list[float] = np.ravel(self.contours).tolist()  # accepts arrays of any dtype and single numbers
        return levels

    @property
    def by_value(self) -> bool:
        """True if low values are more transparent."""
        return self.blend == "value" or (self.blend == "auto" and self.opacity < 1)

    @property
    def is_gray(self) -> bool:
        """True if colors lie on the gray photo."""
        return self.opacity > 0 and (self.ground == "gray" or (self.ground == "auto" and self.by_value))

    @property
    def rings(self) -> bool:
        """True if sinks and query are ringed: not in a picture of the photo or of the colors alone."""
        return self.marks and 0 < self.opacity < 1

    def opaque(self) -> Style:
        """Return the style itself after checking that it is not transparent, for figures of panels and films.

        Raises:
            OptionError: If it is.
        """
        if self.transparent:
            raise OptionError("transparent draws the layer of one picture; figures of panels and films have none. Leave it out.")
        return self

    def colors(self, signed: bool) -> str:
        """Return the name of the color map for signed or unsigned values."""
        return self.colormap or ("blue-white-red" if signed or self.normalize == "symmetric" else "inferno")

    def facts(self, signed: bool) -> dict[str, Any]:
        """Return the options as plain values for provenance, which stores normalization and interpolation separately."""
        blend = "value" if self.by_value else "constant"
        ground = "gray" if self.is_gray else "photo"
        made = asdict(self) | {"colormap": self.colors(signed), "contours": self.lines, "blend": blend, "ground": ground}
        return {name: value for name, value in made.items() if name not in ("normalize", "interpolation")}


COMPONENTS = Style(opacity=1, blend="constant")  # three components are colors already
