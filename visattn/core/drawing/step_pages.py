"""Steps of the attention of one query as a figure: a panel for each step, and the weights of all keys as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from visattn.core.drawing.marks import WHITE, ring
from visattn.core.drawing.pages import FAINT, INK, PAPER, Cell, sheet
from visattn.core.drawing.pictures import Picture, carrying
from visattn.core.drawing.sheets import Panels
from visattn.core.drawing.style import Style
from visattn.core.drawing.style_options import PAGE
from visattn.core.drawing.text import font_of, line_height
from visattn.core.geometry import Geometry
from visattn.core.maps import AttentionMap

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["bars", "step_page"]

_LEAST = 120  # height of the bars in pixels, at least


def step_page(
    photo: Image.Image,
    steps: AttentionMap,
    geometry: Geometry,
    weights: NDArray[np.float32],
    *,
    panel: int = 300,
    title: str = "",
    notes: Sequence[str] = (),
    style: Style | None = None,
) -> Picture:
    """Draw a panel for each step over the photo, with its range, and a bar for the weight of each key.

    Args:
        photo: The photo.
        steps: Map of one image whose only axis is `step`.
        geometry: Position of the model's input on the photo.
        weights: Weights of all keys `(K,)`, those of the prefix tokens first.
        panel: Width of a panel in pixels.
        title: Line above the panels.
        notes: Lines below the panels.
        style: Look of the panels; that of `contact_sheet` by default.

    Returns:
        The figure; PNG files of it store its provenance.
    """
    chosen = Style(**PAGE) if style is None else style.opaque()
    panels = Panels(photo, steps, geometry, panel=panel, shared_axes=(), style=chosen, ranges=True)
    names = steps.labels["step"]
    asked = [geometry.to_photo(*place) for place in steps.facts.query_at]
    on_panel = [(y * panels.photo.height / photo.height, x * panels.photo.width / photo.width) for y, x in asked]
    cells: list[Cell | None] = []
    for number, name in enumerate(names):
        cell = panels.cell(step=number)
        cells.append(Cell(ring(cell.picture, on_panel, WHITE), cell.caption, name))
    first = len(steps.layout.prefix)
    drawn = bars(weights, (panel, max(panels.photo.height, _LEAST)), first)
    before = f"{', '.join(steps.layout.prefix)}, then " if first else ""
    cells.append(Cell(drawn, f"highest {float(weights.max()):.3g}", "weights of all keys"))
    lines = [*notes, f"bars: {before}patches in raster order", *(["white ring: the query"] * bool(on_panel))]
    return carrying(sheet([cells], panel=panel, title=title, notes=lines, bar=panels.bar()), panels.provenance())


def bars(values: NDArray[np.float32], size: tuple[int, int], marked: int = 0) -> Image.Image:
    """Draw values of at least 0 as bars from left to right on white; the first `marked` ones are in another color.

    Where several bars share a column of pixels, the highest is drawn.

    Args:
        values: `(N,)` values.
        size: Width and height of the picture.
        marked: Number of bars in the other color.
    """
    width, height = size
    picture = Image.new("RGB", size, PAPER)
    draw, font = ImageDraw.Draw(picture), font_of(11)
    foot = height - line_height(font) - 2
    most = max(float(values.max()), float(np.finfo(np.float32).tiny))
    for number, value in sorted(enumerate(values.tolist()), key=lambda pair: pair[1]):
        left, right = width * number // len(values), max(width * (number + 1) // len(values) - 1, width * number // len(values))
        color = (213, 94, 0) if number < marked else (0, 114, 178)
        draw.rectangle((left, foot - round((foot - 4) * value / most), right, foot), color)
    draw.line((0, foot, width, foot), INK)
    draw.text((0, foot + 2), "first key", FAINT, font)
    draw.text((width - 1, foot + 2), "last", FAINT, font, anchor="ra")
    return picture
