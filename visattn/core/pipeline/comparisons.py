"""Figures of several maps on one color scale: of two models, or the means of several groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Unpack, get_args

import numpy as np
from PIL import Image

from visattn._support.checks import one_of
from visattn._support.options import with_options
from visattn._support.typed import typed
from visattn.core.drawing.overlays import on_scale
from visattn.core.drawing.pages import Bar, Cell, sheet
from visattn.core.drawing.pictures import Picture, carrying, to_png
from visattn.core.drawing.sheets import Panels, wrap
from visattn.core.drawing.style import Style
from visattn.core.drawing.style_options import PAGE, StyleOptions
from visattn.core.maps import AttentionMap, value_range
from visattn.core.maps.arithmetic import SCALES, MapScale, frame_of, on_own_mean, shared_facts
from visattn.core.maps.scaling import range_words, resolved, shows_nothing
from visattn.core.pipeline.explanation import Explanation
from visattn.core.provenance import Provenance
from visattn.errors import MapError, OptionError, VisattnError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["comparison_page"]


@with_options(StyleOptions)
@typed()
def comparison_page(
    maps: Sequence[Explanation | AttentionMap],
    labels: Sequence[str] = (),
    *,
    scale: MapScale = "relative",
    panel: int = 224,
    title: str = "",
    notes: Sequence[str] = (),
    **style: Unpack[StyleOptions],
) -> Picture:
    """Draw several maps side by side on one color scale, with one color bar.

    Args:
        maps: Explanations, each drawn over its photo; or maps, drawn as colors alone in the frame of the model's input. Heads and layers
            are averaged.
        labels: Text above each panel; by default the model.
        scale: `relative` draws each map in multiples of the mean of its magnitudes, so maps of different models and grids can be compared,
            and 1 is the value of an even map. `raw` draws the values as they are, all of one quantity.
        panel: Width of a panel in pixels.
        title: Title above the panels.
        notes: Lines below the panels.
        style: See `visattn.drawing.Style`. By default `opacity` is 0.6, `blend` is `constant` and `interpolation` is `nearest`, which
            shows every cell.

    Returns:
        The figure, with the range of each map below its panel, and targets and warnings below all. PNG files of it store what the maps'
        provenances share.

    Raises:
        OptionError: If there is no map, or not a label for each.
        MapError: If zero has no meaning in a map (`relative`), maps are of different quantities (`raw`), or one has components.
    """
    one_of(scale, get_args(MapScale), "scale")
    if not maps or len(labels) not in (0, len(maps)):
        raise OptionError(f"a figure needs at least one map and a label for each, got {len(maps)} maps and {len(labels)} labels.")
    shown = [_on_scale(one if isinstance(one, Explanation) else _framed(one), scale) for one in maps]
    _check_quantities(shown, scale)
    chosen = Style(**PAGE | style).opaque()
    panels = [
        Panels(each.photo, each.map, each.geometry, panel=panel, shared_axes=(), style=replace(chosen, normalize="minmax"))
        for each in shown
    ]
    signed = any(each.heat.signed for each in panels)
    values = np.concatenate([each.heat.grid.ravel() for each in panels])
    low, high = value_range(values, chosen.normalize, signed, holes=True)
    over = [replace(chosen, opacity=1, blend="constant") if isinstance(one, AttentionMap) else chosen for one in maps]
    names = list(labels) or [each.provenance.model for each in shown]
    cells = [Cell(*_drawn(each, low, high, signed, own), name) for each, own, name in zip(panels, over, names, strict=True)]
    across = wrap(len(cells))
    rows = [cells[first : first + across] for first in range(0, len(cells), across)]
    how = f"{resolved(chosen.normalize, values, signed)}, one scale for all panels"
    bar = _bar(low, high, chosen.colors(signed), f"{shown[0].map.meaning if scale == 'raw' else SCALES[scale]}, {how}")
    records = [each.provenance for each in shown]
    facts, told = _facts(records), [f"{name}: {text}" for name, one in zip(names, records, strict=True) for text in _told(one)]
    lines = [*notes, *told, *(f"warning: {text}" for text in facts.warnings)]
    page = sheet(rows, panel=panel, title=title, notes=lines, bar=bar)
    drawing = chosen.facts(signed) | {"interpolation": chosen.interpolation, "panel": panel, "scale": scale, "labels": names}
    return carrying(page, facts.but(normalization=how, value_range=(low, high), drawing=drawing))


def png_of(one: AttentionMap) -> bytes | None:
    """Return the colors of a map for notebooks, in the frame of the model's input; None for components and maps that cannot be drawn."""
    try:
        return to_png(comparison_page([one], scale="raw"))
    except VisattnError:
        return None


def _framed(one: AttentionMap) -> Explanation:
    """Return a map over an empty photo that is the model's input itself."""
    geometry = frame_of(one)
    return Explanation(Image.new("RGB", geometry.photo[::-1]), geometry, one)


def _on_scale(one: Explanation, scale: MapScale) -> Explanation:
    """Return an explanation with a single map on the scale."""
    reduced = one.panel
    if reduced.axes:
        raise MapError("components have no common scale with other maps. Choose one with at(component=0).")
    return replace(one, map=on_own_mean(reduced) if scale == "relative" else reduced)


def _check_quantities(shown: Sequence[Explanation], scale: MapScale) -> None:
    quantities = list(dict.fromkeys(one.map.meaning for one in shown))
    if scale == "raw" and len(quantities) > 1:
        raise MapError(f"raw values of different quantities have no common scale: {', '.join(quantities)}. Use scale='relative'.")


def _drawn(panel: Panels, low: float, high: float, signed: bool, style: Style) -> tuple[Image.Image, str]:
    """Draw a panel on the common scale; return it with the range of its own map."""
    heat = replace(panel.heat, signed=signed)
    grid: NDArray[np.float32] = heat.grid[~np.isnan(heat.grid)]
    own = range_words(float(grid.min()), float(grid.max())) if grid.min() < grid.max() else f"constant {float(grid.min()):.3g}"
    return on_scale(panel.photo, heat, low, high, style), own if not shows_nothing(style.normalize, low, high) else f"even, {own}"


def _bar(low: float, high: float, colormap: str, what: str) -> Bar:
    ticks = tuple(f"{low + (high - low) * i / 4:.3g}" for i in range(5))
    return Bar(colormap, ticks, what)


def _told(one: Provenance) -> list[str]:
    """Return the target of a panel, and that its weights are random."""
    return [*one.target, *([one.weights] if one.random else [])]


def _facts(records: Sequence[Provenance]) -> Provenance:
    """Return what all records share, with every model, method and warning."""
    named: dict[str, Any] = {
        name: " and ".join(dict.fromkeys(str(getattr(one, name)) for one in records)) for name in ("model", "method")
    }
    warnings = tuple(text for one in records for text in one.warnings)
    return replace(reduce(shared_facts, records), **named).but(warnings=warnings)
