"""Explanation of one photo by one method: the map, its position on the photo, and its picture."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from PIL import Image

from visattn._support.faces import Later
from visattn._support.options import with_options
from visattn._support.reprs import in_pixels, in_runs
from visattn._support.typed import typed
from visattn._support.types import Interpolation
from visattn.core.drawing.style_options import StyleOptions
from visattn.core.geometry import Geometry
from visattn.core.maps import AttentionMap
from visattn.core.offers import offered
from visattn.core.pipeline.outputs import noun_of
from visattn.core.provenance import Provenance
from visattn.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from visattn._support import html, whole_files
    from visattn.core.drawing import marks, overlays, pages, pictures, sheets, style as styles
    from visattn.core.drawing.pictures import Picture
    from visattn.core.drawing.style import Style
    from visattn.core.maps import Heatmap, map_files as files, map_formats as formats, regions, scaling
    from visattn.core.maps.regions import Region
else:
    html, whole_files = Later("visattn._support.html"), Later("visattn._support.whole_files")
    marks, overlays, pages, pictures, sheets, styles = (
        Later(f"visattn.core.drawing.{name}") for name in ("marks", "overlays", "pages", "pictures", "sheets", "style")
    )
    files, formats, regions, scaling = (
        Later(f"visattn.core.maps.{name}") for name in ("map_files", "map_formats", "regions", "scaling")
    )

__all__ = ["Explanation"]


class DrawOptions(StyleOptions, total=False):
    """Options of `Explanation.draw`."""

    mass: float | None
    box: str | None
    legend: bool
    caption: bool


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

    def __repr__(self) -> str:
        """Return method, model, photo, what is shown, and the shape of the map."""
        axes = f"{', '.join(self.map.axes)} " if self.map.axes else ""
        size = " x ".join(map(str, self.map.values.shape))
        count = len(self.provenance.warnings)
        warned = f", {count} warning{'s' * (count > 1)}" if count else ""
        shown = f"{self.map.meaning} of {self.provenance.title[:150]}"
        return f"<Explanation: {', '.join([shown, *self._shown()])[:300]}, map {axes}{size}{warned}>"

    def _shown(self) -> list[str]:
        """Return class, layer, head and query of the map, as far as they apply."""
        facts, record = self.map.facts, self.provenance
        head = record.parameters.get("head", "all") if "head" not in self.map.axes else "all"
        named = {
            "for": ", ".join(score["name"] or f"{noun_of(score['outputs'])} {score['class']}" for score in record.scores),
            "layer": facts.layer,
            "head": "" if head == "all" else head,
            "query": in_runs(facts.query.split("+"), "+"),
        }
        return [f"{name} {value}" for name, value in named.items() if value != ""]

    @property
    def provenance(self) -> Provenance:
        """Record of how the map was made."""
        return self.map.provenance

    @property
    def panel(self) -> AttentionMap:
        """Map reduced to one panel: the mean over heads and layers. Components of a PCA are kept."""
        reduced = self.map
        for name in reduced.axes:
            reduced = reduced if name == "component" else reduced.mean(name)
        return reduced

    def at(self, **index: int) -> Explanation:
        """Return the explanation of one head, layer or component; see `AttentionMap.at`."""
        return replace(self, map=self.map.at(**index))

    def heatmap(self, interpolation: Interpolation = "bilinear") -> Heatmap:
        """Return the panel in pixels of the photo."""
        return self.panel.to_heatmap(self.geometry, interpolation)

    @with_options(StyleOptions)
    def draw(
        self,
        *,
        mass: float | None = None,
        box: str | None = None,
        legend: bool = False,
        caption: bool = False,
        **style: Unpack[StyleOptions],
    ) -> tuple[Picture, Provenance]:
        """Draw the heatmap over the photo.

        Args:
            mass: Share of the map; the outline of the smallest region that holds it is drawn too. Glimpse paths are always drawn.
            box: `mass:0.5` or `quantile:0.9`: the bounding box of the largest part of this mask is drawn too; see `AttentionMap.box`.
            legend: Whether to draw the color bar with the values of its ends on a band below the picture.
            caption: Whether to write the predicted class, its probability and the target on a band below the picture. A photo that is
                narrower than 224 pixels is enlarged above a band: each of its pixels becomes a square.
            style: See `visattn.drawing.Style`. Here `normalize="auto"` is percentile for pixel attributions and sampled points.
                Components of a PCA become red, green and blue; no style applies to them.

        Returns:
            The picture and its provenance, which includes the value range of the color scale.

        Raises:
            ShapeError: If the map has components, but not three.
            OptionError: If an option is unknown or out of range, or `transparent` is combined with a band or components.
            MapError: If the map has no such box.
        """
        chosen = styles.Style(**style)
        if chosen.transparent and (legend or caption):
            raise OptionError("transparent draws a layer of the photo's size, without a band. Leave legend and caption out.")
        region = None if box is None else regions.region_of(self.panel, box, self.geometry, chosen.interpolation)
        if "component" in self.map.axes:
            if chosen.transparent:
                raise OptionError("components fill every pixel, so no layer is transparent. Leave transparent out.")
            return (parts := overlays.rgb_components(self.photo, self.heatmap("nearest"))), parts.provenance
        heat = self.heatmap(chosen.interpolation)
        even = not heat.signed and scaling.nearly_even(float(np.nanmin(heat.grid)), float(np.nanmax(heat.grid)))
        if chosen.normalize == "auto" and self.map.facts.pixelwise and not even:
            chosen = replace(chosen, normalize="percentile")  # outliers would dominate the color scale
        draw = partial(self._drawn, heat=heat, mass=mass, region=region)
        colored = overlays.layered(self.photo.size, heat, chosen, draw) if chosen.transparent else draw(self.photo, style=chosen)
        picture: Image.Image = colored
        record = colored.provenance
        bar = pages.bar_of(heat, chosen) if legend and "uncolored" not in record.drawing else None
        factor = pages.enlargement(self.photo) if caption or bar else 1
        if factor > 1:
            photo, of_large = pages.enlarged(self.photo, factor), region and region.enlarged(factor)
            large = replace(self, photo=photo, geometry=self.geometry.resized((photo.height, photo.width)))
            heat = large.heatmap(chosen.interpolation)
            picture = large._drawn(photo, heat=heat, mass=mass, region=of_large, style=chosen, quiet=True)
        if caption or bar:
            lines = [*self._caption(chosen.rings), *([region.words()] if region else [])]
            picture = pages.captioned(picture, lines if caption else (), bar)
        settings = {"interpolation": chosen.interpolation, "mass": mass, "legend": legend, "caption": caption, "enlarged": factor}
        record = record.but(drawing=record.drawing | settings | {"box": region and region.facts()})
        return pictures.carrying(picture, record), record

    def _drawn(
        self,
        background: Image.Image,
        /,
        *,
        heat: Heatmap,
        mass: float | None,
        region: Region | None,
        style: Style,
        quiet: bool = False,
    ) -> Picture:
        """Draw heatmap, outline, glimpses, windows and boxes on a background of the photo's size."""
        colored = overlays.painted(background, heat, style, quiet=quiet)
        picture: Image.Image = colored
        if mass is not None:
            mask = self.panel.mass(mass).to_heatmap(self.geometry, "nearest")
            picture = overlays.ringed(marks.outline(picture, mask), heat, style)  # no line hides a ring
        if region:
            picture = overlays.ringed(marks.draw_box(picture, region.box, str(region.share), heat.seen), heat, style)
        for glimpses in self.map.facts.glimpses:
            on_photo = [[self.geometry.box_to_photo(box) for box in boxes] for boxes in glimpses]
            picture = marks.draw_glimpses(picture, on_photo, heat.seen)
        for windows in self.map.facts.windows:
            for window in windows:
                picture = marks.draw_box(picture, self.geometry.box_to_photo(window), seen=heat.seen)
        for detection in self.map.facts.detections:
            picture = marks.draw_box(picture, self.geometry.box_to_photo(detection.box), detection.label, heat.seen)
        return pictures.carrying(picture, colored.provenance)

    def _caption(self, rings: bool = True) -> list[str]:
        """Return what the picture shows: target, map, crop, meaning of the rings if there are any, warnings."""
        facts, seen, photo = self.provenance, self.geometry.seen(), self.geometry.photo
        how = ", ".join([f"{self.map.meaning}: {facts.title}", *self._shown()])
        lines = [*facts.target[:1], how]
        if (seen.height, seen.width) != photo:
            lines.append(f"the model received {in_pixels((seen.height, seen.width))} of {in_pixels(photo)} pixels")
        marked = ["cyan, a sink"] * any(self.map.facts.sinks) + ["white, the query"] * bool(self.map.facts.query_at)
        if rings and marked:
            lines.append(f"rings: {', '.join(marked)}")
        if self.map.facts.windows:
            lines.append("box: the window of the query, outside which it cannot attend")
        return [*lines, *(f"warning: {text}" for text in facts.warnings)]

    def overlay(self, **options: Unpack[DrawOptions]) -> Picture:
        """Draw the heatmap over the photo, with the options of `draw`. PNG files of the picture store its provenance."""
        return self.draw(**options)[0]

    @with_options(DrawOptions)
    @typed()
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True, **options: Unpack[DrawOptions]) -> Path:
        """Save the picture with its provenance; takes the options of `draw`.

        Args:
            path: File whose ending names the format: .png, .jpg or .webp. Its folder is created.
            overwrite: Whether an existing file may be replaced.
            options: See `draw`.

        Returns:
            The path.

        Raises:
            OptionError: If the ending is another one, or stands for JPEG and the picture is transparent.
            OutputError: If the file exists and `overwrite` is false, or if it cannot be written.
        """
        target = whole_files.check_output(Path(path), overwrite=overwrite)
        kind = pictures.format_of(target)
        pictures.check_transparency(kind, transparent=bool(options.get("transparent")))
        return whole_files.write_whole(target, pictures.encoded(self.overlay(**options), kind))

    @typed()
    def save_map(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Save the raw map on its grid, which `visattn.load_map` reads.

        Args:
            path: File whose ending names the format; `visattn.save_map` says what each holds. Its folder is created.
            overwrite: Whether an existing file may be replaced.

        Returns:
            The path.

        Raises:
            OptionError: If the ending is another one, or stands for a format of one grid and the map has several.
            OutputError: If the file exists and `overwrite` is false, or if it cannot be written.
        """
        content = files.save_map(self.map, self.geometry, formats.map_format(Path(path)))
        return whole_files.write_whole(whole_files.check_output(Path(path), overwrite=overwrite), content)

    def contact_sheet(self, **options: Any) -> Picture:  # noqa: ANN401
        """Draw one panel for each entry of the map's axes, for example one for each head; see `visattn.contact_sheet`.

        Args:
            options: See `visattn.contact_sheet`. By default the first of two axes is in rows; the title says what is shown.

        Returns:
            The figure; PNG files of it store its provenance.

        Raises:
            OptionError: If the map has only one panel, or more than two axes.
        """
        axes = self.map.axes
        given: dict[str, Any] = dict(zip(("rows", "columns"), axes, strict=True)) if len(axes) == 2 else {}
        given["title"] = ", ".join([self.provenance.title, *self._shown()])
        given["notes"] = tuple(f"warning: {text}" for text in self.provenance.warnings)
        return sheets.contact_sheet(self.photo, self.map, self.geometry, **given | options)

    def show(self, **options: Unpack[DrawOptions]) -> None:
        """Show the picture: in a notebook below the cell, else in the system's image viewer; takes the options of `draw`."""
        picture = self.overlay(**options)
        if "IPython" in sys.modules and (display := import_module("IPython.display")) and sys.modules["IPython"].get_ipython():
            display.display(picture)
        else:
            picture.show()

    def check(self, **options: Any) -> Any:  # noqa: ANN401 - a `Check`
        """Test how far this map can be trusted, with the model that made it; see `visattn.evaluation.check`."""
        return offered("check", "map")(self, **options)

    def checked(self, **options: Any) -> Explanation:  # noqa: ANN401
        """Return the explanation with the numbers of `check` among the notes of its provenance."""
        notes = tuple(f"check: {line}" for line in self.check(**options).lines())
        return replace(self, map=replace(self.map, provenance=self.provenance.but(notes=notes)))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps: all but the model that made the map."""
        return {name: value for name, value in vars(self).items() if name != "made_by"}

    def numpy(self) -> NDArray[Any]:
        """Return the raw values of the map, `(*axes, rows, columns)`."""
        return self.map.numpy()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the raw values of the map, for `numpy.asarray`."""
        return self.map.__array__(dtype, copy)

    def _ipython_display_(self) -> None:
        """Show the picture below a cell, and below it what it shows and the warnings; a notebook stores each once."""
        shown = import_module("IPython.display")
        shown.display(shown.Image(pictures.encoded(self.overlay(), "JPEG")), shown.HTML(html.joined(self._caption())))

    def _repr_html_(self) -> str:
        """Return the picture with its text, for programs that show HTML and are no notebooks."""
        return html.figure(pictures.encoded(self.overlay(), "JPEG"), self._caption())
