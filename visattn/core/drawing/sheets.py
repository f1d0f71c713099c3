"""Contact sheets: figures with all panels of one map, the value range of each, and one color bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

import numpy as np
from PIL import Image

from visattn._support.checks import between, one_of
from visattn._support.language import worded
from visattn._support.options import with_options
from visattn._support.reprs import in_pixels
from visattn._support.typed import typed
from visattn.core.drawing.marks import WHITE, outline, ring
from visattn.core.drawing.overlays import on_scale, ringed
from visattn.core.drawing.pages import Bar, Cell, sheet
from visattn.core.drawing.pictures import Picture, carrying
from visattn.core.drawing.style import Style
from visattn.core.drawing.style_options import PAGE, StyleOptions
from visattn.core.geometry import Geometry
from visattn.core.images.sources import as_image
from visattn.core.maps import AttentionMap, Heatmap, value_range
from visattn.core.maps.scaling import names_of, range_words, shows_nothing
from visattn.core.provenance import Provenance
from visattn.errors import OptionError, ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Panels", "contact_sheet", "wrap"]

_TALLEST = 10  # largest panel height relative to its width
_ROUNDING = 1e-6  # relative rounding error of a softmax in float32


class Panels:
    """Panels of a map over its photo, all of the same size, with their color bar."""

    def __init__(
        self,
        photo: object,
        attention_map: AttentionMap,
        geometry: Geometry,
        *,
        panel: int,
        shared_axes: Sequence[str],
        style: Style,
        ranges: bool = False,
    ) -> None:
        """Resize photo and map to the panel size; see `contact_sheet`. With `ranges`, the range is below a panel in any case."""
        whole = as_image(photo)
        if geometry.photo != (whole.height, whole.width):
            size = in_pixels(geometry.photo)
            raise ShapeError(
                f"the photo must have the geometry's {size} pixels, got {whole.width} x {whole.height}. "
                "Pass the photo that the geometry was made for."
            )
        height = max(1, round(whole.height * panel / whole.width))
        if height > _TALLEST * panel:
            raise OptionError(
                f"a photo of {whole.width} x {whole.height} pixels is too narrow for a figure of panels. "
                f"Use {worded('overlay', 'visattn overlay')}."
            )
        self.geometry = geometry.resized((height, panel))
        self.photo = whole.resize((panel, height), Image.Resampling.BOX if whole.width > panel else Image.Resampling.BICUBIC)
        self.heat = attention_map.to_heatmap(self.geometry, style.interpolation)
        self.style, self._shared, self._whole = style, tuple(shared_axes), geometry
        parts = _parts(self.heat, shared_axes)
        self._scales = {index: value_range(grid, style.normalize, self.heat.signed, holes=True) for index, grid in parts.items()}
        self._names = names_of(style.normalize, parts.values(), self.heat.signed)
        self._one_scale = len(set(self._scales.values())) == 1 and not ranges

    def cell(self, **index: int) -> Cell:
        """Draw one panel, with its own range below; if its color scale shows nothing, the photo is unchanged."""
        one = self.heat.at(**index)
        low, high = self._scales[tuple(index[name] for name in self.heat.axes)]
        picture = self.photo if _flat(low, high) else on_scale(self.photo, one, low, high, self.style)
        lowest, highest = float(np.nanmin(one.grid)), float(np.nanmax(one.grid))
        if _flat(lowest, highest):
            return Cell(picture, f"constant {lowest:.3g}")
        if shows_nothing(self.style.normalize, low, high):
            return Cell(picture, f"nearly even, {range_words(low, high)}")
        return Cell(picture, "" if self._one_scale else f"{low:.2g} to {high:.2g}")

    def provenance(self, **drawing: object) -> Provenance:
        """Return the provenance of a figure of these panels, with additional facts about the drawing."""
        scope = f"one scale over {' and '.join(self._shared)}" if self._shared else "each panel on its own scale"
        scales = self._scales.values()
        known = self.style.facts(self.heat.signed) | {
            "interpolation": self.style.interpolation,
            "panel": self.photo.width,
        }
        return self.heat.provenance.but(
            geometry=self._whole,  # refers to the photo, not to the resized panel
            normalization=f"{self._names}, {scope}",
            value_range=(min(low for low, _ in scales), max(high for _, high in scales)),
            drawing=known | drawing,
        )

    def bar(self) -> Bar:
        """Return the color bar; it has numbers if all panels share one scale."""
        what, colors = self.heat.meaning, self.style.colors(self.heat.signed)
        if not self._one_scale:
            ends = ("panel minimum", "panel maximum") if self._names == "minmax" else ("low end", "high end")
            return Bar(colors, ends, f"{what}, {self._names}, each panel on its own scale (range below it)")
        low, high = next(iter(self._scales.values()))
        ticks = tuple(f"{low + (high - low) * i / 4:.3g}" for i in range(5))
        return Bar(colors, ticks, f"{what}, one scale for all panels")


@with_options(StyleOptions)
@typed(but=("photo",))
def contact_sheet(
    photo: object,
    attention_map: AttentionMap,
    geometry: Geometry,
    *,
    rows: str | None = None,
    columns: str | None = None,
    panel: int = 224,
    shared_axes: Sequence[str] = (),
    mass: float | None = None,
    points: Sequence[tuple[float, float]] = (),
    title: str = "",
    notes: Sequence[str] = (),
    **style: Unpack[StyleOptions],
) -> Picture:
    """Draw all panels of a map over its photo, arranged by the map's axes, with the range of each panel and one color bar.

    Args:
        photo: The photo.
        attention_map: Map of one image with one or two axes.
        geometry: Position of the model's input on the photo.
        rows: Axis to arrange in rows. A map with one axis is wrapped into several rows if neither `rows` nor `columns` is given.
        columns: Axis to arrange in columns.
        panel: Width of a panel in pixels.
        shared_axes: Axes whose panels share one color scale. By default each panel has its own, with its range written under it.
        mass: Share of a panel's map, from 0 to 1; the outline of the smallest region that holds it is drawn.
        points: Points `(y, x)` of the photo to mark with white rings on every panel, for example the query.
        title: Title above the panels.
        notes: Lines below the panels.
        style: See `visattn.drawing.Style`. By default `opacity` is 0.6, `blend` is `constant` and `interpolation` is `nearest`,
            which shows every patch.

    Returns:
        The figure; PNG files of it store its provenance.

    Raises:
        OptionError: If the axes differ from those of the map.
        ShapeError: If the geometry belongs to a photo of another size.
    """
    if mass is not None:
        between(mass, 0, 1, "mass")
    named = [name for name in (rows, columns) if name]
    for name in (*named, *shared_axes):
        one_of(name, attention_map.axes, "axis")
    wrapped = not named and len(attention_map.axes) == 1
    if not attention_map.axes or not (wrapped or sorted(named) == sorted(attention_map.axes)):
        raise OptionError(
            "a contact sheet needs one or two axes, all named as rows or columns: the map has "
            f"{', '.join(attention_map.axes) or 'one panel and no axes'}, got {', '.join(named) or 'none'}."
        )
    panels = Panels(photo, attention_map, geometry, panel=panel, shared_axes=shared_axes, style=Style(**PAGE | style).opaque())
    heat, place = panels.heat, panels.geometry
    masks = attention_map.mass(mass).to_heatmap(place, "nearest") if mass is not None else None
    marked = [(y * place.photo[0] / geometry.photo[0], x * place.photo[1] / geometry.photo[1]) for y, x in points]

    def cell(index: dict[str, int]) -> Cell:
        one = panels.cell(**index)
        if masks is not None:
            outlined = outline(one.picture, masks.at(**index))
            one = replace(one, picture=ringed(outlined, heat.at(**index), panels.style))  # no line hides a ring
        return replace(one, picture=ring(one.picture, marked, WHITE))

    sizes = dict(zip(heat.axes, heat.values.shape, strict=False))
    labels = {name: [f"{name} {text}" if text.isdigit() else text for text in _labels(heat, name)] for name in heat.axes}
    if not named:
        (name,) = heat.axes
        across = wrap(sizes[name])
        cells = [cell({name: i}) for i in range(sizes[name])]
        cells = [Cell(c.picture, f"{labels[name][i]}   {c.caption}".strip()) for i, c in enumerate(cells)]
        grid: list[list[Cell | None]] = [list(cells[i : i + across]) for i in range(0, len(cells), across)]
        row_labels: list[str] = []
        column_labels: list[str] = []
    else:
        grid = [
            [cell({n: i for n, i in ((rows, r), (columns, c)) if n}) for c in range(sizes[columns] if columns else 1)]
            for r in range(sizes[rows] if rows else 1)
        ]
        row_labels = labels[rows] if rows else []
        column_labels = labels[columns] if columns else []
    if masks is not None:
        text = f"outline: the smallest region that holds {mass:.0%} of the panel's sum, without parts of one or two patches"
        notes = (text, *notes)
    if panels.style.rings and heat.marks:
        notes = ("rings: sinks, patches that receive more than 20 times the uniform share of attention", *notes)
    page = sheet(
        grid, panel=panel, title=title, notes=notes, row_labels=row_labels, column_labels=column_labels, bar=panels.bar()
    )
    return carrying(page, panels.provenance(mass=mass, points=[list(point) for point in points]))


def _parts(heat: Heatmap, shared_axes: Sequence[str]) -> dict[tuple[int, ...], NDArray[np.float32]]:
    """Return for each panel the raw values that its scale is computed from."""
    sizes = heat.grid.shape[: len(heat.axes)]
    own = [i for i, name in enumerate(heat.axes) if name not in shared_axes]
    return {
        index: heat.grid[tuple(index[i] if i in own else slice(None) for i in range(len(sizes)))] for index in np.ndindex(*sizes)
    }


def _flat(low: float, high: float) -> bool:
    """Check whether the difference of two values is only rounding error."""
    return high - low <= _ROUNDING * max(abs(low), abs(high))


def _labels(heat: Heatmap, name: str) -> Sequence[str]:
    size = heat.values.shape[heat.axes.index(name)]
    return heat.labels.get(name) or [str(i) for i in range(size)]


def wrap(count: int) -> int:
    """Return the number of columns for `count` panels: one row for up to four, else a roughly square grid with a full last row."""
    if count <= 4:
        return count
    return min(range(3, 9), key=lambda across: (-count % across, abs(across - count**0.5)))
