"""Explanation of one photo by one method: the map, its position on the photo, and its picture."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from PIL import Image

from visattn._support.files import check_output, check_png, write_whole
from visattn._support.typed import typed
from visattn._support.types import Interpolation
from visattn.drawing.marks import draw_glimpses, outline
from visattn.drawing.overlays import painted, rgb_components
from visattn.drawing.pages import captioned
from visattn.drawing.pictures import Picture, carrying, to_png
from visattn.drawing.style import Style, StyleOptions
from visattn.errors import ShapeError
from visattn.geometry import Geometry
from visattn.maps import AttentionMap, Heatmap
from visattn.provenance import Provenance


@dataclass(frozen=True, eq=False)
class Explanation:
    """Map of one photo by one method.

    Attributes:
        photo: The upright photo.
        geometry: Position of the model's input on the photo.
        map: Raw values on the token grid, for this photo only.
    """

    photo: Image.Image
    geometry: Geometry
    map: AttentionMap

    @property
    def provenance(self) -> Provenance:
        """Record of how the map was made."""
        return self.map.provenance

    @property
    def panel(self) -> AttentionMap:
        """Map reduced to one panel: the mean over heads and layers. Components of a PCA are kept."""
        one = self.map
        for name in one.axes:
            one = one if name == "component" else one.mean(name)
        return one

    def at(self, **index: int) -> Explanation:
        """Return the explanation of one head, layer or component; see `AttentionMap.at`."""
        return replace(self, map=self.map.at(**index))

    def heatmap(self, interpolation: Interpolation = "bilinear") -> Heatmap:
        """Return the panel in pixels of the photo."""
        return self.panel.to_heatmap(self.geometry, interpolation)

    def draw(
        self, *, mass: float | None = None, caption: bool = False, **style: Unpack[StyleOptions]
    ) -> tuple[Picture, Provenance]:
        """Draw the heatmap over the photo.

        Args:
            mass: Share of the map; the outline of the smallest region that holds it is drawn too. Glimpse paths are always drawn.
            caption: Whether to write the predicted class, its probability and the target on a band below the picture.
            style: See `visattn.drawing.Style`. Here `normalize="auto"` is percentile for pixel attributions. Components of a
                PCA become red, green and blue; no style applies to them.

        Returns:
            The picture and its provenance, which includes the value range of the color scale.

        Raises:
            ShapeError: If the map has components, but not three.
        """
        if "component" in self.map.axes:
            if self.map.values.shape[: len(self.map.axes)] != (3,):
                raise ShapeError(
                    f"components to draw must be three, got {self.map.axes} {tuple(self.map.values.shape)}. Choose with .at()."
                )
            parts = rgb_components(self.photo, self.heatmap("nearest"))
            return parts, parts.provenance
        chosen = Style(**style)
        if chosen.normalize == "auto" and self.map.facts.pixelwise:
            chosen = replace(chosen, normalize="percentile")  # outliers would dominate the color scale
        heat = self.heatmap(chosen.interpolation)
        colored = painted(self.photo, heat, replace(chosen, normalize=chosen.scale(heat.signed)))
        picture: Image.Image = colored
        if mass is not None:
            picture = outline(picture, self.panel.mass(mass).to_heatmap(self.geometry, "nearest"))
        for glimpses in self.map.facts.glimpses:
            on_photo = [[self.geometry.box_to_photo(box) for box in boxes] for boxes in glimpses]
            picture = draw_glimpses(picture, on_photo, heat.seen)
        if caption:
            picture = captioned(picture, self._caption())
        made = colored.provenance
        asked = {"interpolation": chosen.interpolation, "mass": mass, "caption": caption}
        made = made.but(drawing=made.drawing | asked)
        return carrying(picture, made), made

    def _caption(self) -> list[str]:
        facts, layer = self.provenance, self.map.facts.layer
        how = f"{self.map.meaning}: {facts.title}" + (f", layer {layer}" if layer else "")
        return [*facts.target[:1], *(f"warning: {text}" for text in facts.warnings), how]

    def overlay(self, **options: Any) -> Picture:  # noqa: ANN401
        """Draw the heatmap over the photo, with the options of `draw`. PNG files of the picture store its provenance."""
        return self.draw(**options)[0]

    @typed()
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False, **options: Any) -> Path:  # noqa: ANN401
        """Save the picture as a PNG that stores its provenance; takes the options of `draw`.

        Raises:
            OptionError: If the name does not end in .png.
            OutputError: If the file exists and `overwrite` is false, or if it cannot be written.
        """
        target = check_output(check_png(Path(path)), overwrite=overwrite)
        return write_whole(target, to_png(self.overlay(**options)))
