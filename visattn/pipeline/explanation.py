"""One method's answer for one photo: the map, where it lies on the photo, and its picture."""

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
    """One method's answer for one photo.

    Attributes:
        photo: The upright photo.
        geometry: Where the model's input lies on it.
        map: Raw values on the token grid, of this photo alone.
    """

    photo: Image.Image
    geometry: Geometry
    map: AttentionMap

    @property
    def provenance(self) -> Provenance:
        """How it was made."""
        return self.map.provenance

    @property
    def panel(self) -> AttentionMap:
        """The map as one panel: several heads or layers are averaged; components of a PCA stay apart."""
        one = self.map
        for name in one.axes:
            one = one if name == "component" else one.mean(name)
        return one

    def at(self, **index: int) -> Explanation:
        """The explanation of one head, layer or component; see `AttentionMap.at`."""
        return replace(self, map=self.map.at(**index))

    def heatmap(self, interpolation: Interpolation = "bilinear") -> Heatmap:
        """The panel in the photo's pixels."""
        return self.panel.to_heatmap(self.geometry, interpolation)

    def draw(
        self, *, mass: float | None = None, caption: bool = False, **style: Unpack[StyleOptions]
    ) -> tuple[Picture, Provenance]:
        """The photo under its heatmap, and how the picture was made.

        Args:
            mass: Also draw the outline of the patches that hold this share. The path of glimpses is drawn without being asked for.
            caption: Write the predicted class with its probability, and what was explained, on a band below the picture.
            style: See `visattn.drawing.Style`; here `normalize="auto"` is percentile for attributions of single pixels. Components of a
                PCA become red, green and blue, and take no style.

        Returns:
            The picture and its provenance, with the range of values behind the colors.

        Raises:
            ShapeError: If there are components, and not three.
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
            chosen = replace(chosen, normalize="percentile")  # of single pixels a few would leave all others white
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
        how = f"{self.map.meaning} of {facts.model}" + (f", layer {layer}" if layer else "")
        return [*facts.target[:1], *(f"warning: {text}" for text in facts.warnings), how]

    def overlay(self, **options: Any) -> Picture:  # noqa: ANN401
        """The photo under its heatmap; options of `draw`. A PNG that it is saved to carries how it was made."""
        return self.draw(**options)[0]

    @typed()
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False, **options: Any) -> Path:  # noqa: ANN401
        """Write the picture as PNG with its provenance inside; options of `draw`.

        Raises:
            OptionError: If the name does not end in .png.
            OutputError: If the file exists and `overwrite` is false, or cannot be written.
        """
        target = check_output(check_png(Path(path)), overwrite=overwrite)
        return write_whole(target, to_png(self.overlay(**options)))
