"""Figures of many panels with labels, captions and one color bar. Pillow draws them; no plotting library is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw

from visattn.core.drawing import colormaps
from visattn.core.drawing.style import Style
from visattn.core.drawing.text import Font, clip_text, font_of, line_height, lines_of, text_width, wrap_text
from visattn.core.maps.heatmaps import Heatmap
from visattn.core.maps.scaling import resolved, value_range

__all__ = ["Bar", "Cell", "sheet"]

INK, PAPER, FAINT = (24, 24, 27), (255, 255, 255), (110, 110, 118)
GAP, MARGIN = 8, 18


@dataclass(frozen=True)
class Cell:
    """One panel of a figure, with a heading above and a caption of one or more lines below."""

    picture: Image.Image
    caption: str = ""
    heading: str = ""


@dataclass(frozen=True)
class Bar:
    """Color bar: the color map's name, the ticks from left to right, and a label."""

    colormap: str
    ticks: tuple[str, ...]
    label: str


def bar_of(heat: Heatmap, style: Style) -> Bar:
    """Return the color bar of a heatmap in a style, with the values of its ends; with < and > where values lie beyond them."""
    scale = resolved(style.normalize, heat.grid, heat.signed)
    low, high = value_range(heat.grid, scale, heat.signed, holes=True)
    beyond = "<" * bool(np.nanmin(heat.grid) < low), ">" * bool(np.nanmax(heat.grid) > high)
    ends = f"{beyond[0]}{low:.3g}", f"{beyond[1]}{high:.3g}"
    return Bar(style.colors(heat.signed), ends, f"{heat.meaning}, {scale}")


_LEGIBLE = 224  # least width of a picture above a band of text
# width of a photo of 3 to 2 divided by the root of its area: text of a wider one has the size of one of its area
_LANDSCAPE = 1.5**0.5
_ROOMY = 120  # width of panels whose captions fit at 12 pixels; at 11, words run together


def sheet(
    rows: Sequence[Sequence[Cell | None]],
    *,
    panel: int = 224,
    title: str = "",
    notes: Sequence[str] = (),
    row_labels: Sequence[str] = (),
    column_labels: Sequence[str] = (),
    bar: Bar | None = None,
) -> Image.Image:
    """Draw panels in rows and columns on a white background.

    Args:
        rows: Rows of panels; None leaves a cell empty. Rows may differ in length.
        panel: Width of a panel in pixels; pictures are scaled to it.
        title: Title above the panels.
        notes: Notes below the panels, wrapped to the width of the figure.
        row_labels: Text to the left of each row.
        column_labels: Text above each column.
        bar: Color bar below the panels.

    Returns:
        The figure.
    """
    columns = max((len(row) for row in rows), default=0)
    wide = columns * (panel + GAP)  # text grows with the page, which a screen shows as a whole; captions must fit their panel
    title_font, label_font, caption_font = (
        font_of(max(15, min(panel, 320) // 14, wide // 70)),
        font_of(max(12, min(panel, 320) // 17, wide // 90)),
        font_of(max(12 if panel >= _ROOMY else 11, min(panel, 320) // 20, min(wide // 110, panel // 13))),
    )
    scaled = [[cell and replace(cell, picture=_to_width(cell.picture, panel)) for cell in row] for row in rows]
    left = MARGIN + (max((text_width(text, label_font) for text in row_labels), default=0) + GAP if row_labels else 0)
    page_width = max(left + columns * (panel + GAP) - GAP + MARGIN, 420)
    lines = [line for note in notes for line in wrap_text(note, caption_font, page_width - 2 * MARGIN)]
    title_lines = wrap_text(title, title_font, page_width - 2 * MARGIN) if title else []
    caption_height = line_height(caption_font) + 4
    above = [line_height(label_font) + 4 if any(cell and cell.heading for cell in row) else 0 for row in scaled]
    heights = [
        heading
        + max((cell.picture.height for cell in row if cell), default=0)
        + caption_height * max((len(lines_of(cell.caption)) for cell in row if cell), default=0)
        for row, heading in zip(scaled, above, strict=True)
    ]
    top = MARGIN + len(title_lines) * (line_height(title_font) + 4) + (GAP if title else 0)
    top += line_height(label_font) + 6 if column_labels else 0
    bar_height = 18 + line_height(caption_font) * 2 + 14 if bar else 0
    bottom = sum(heights) + GAP * len(heights) + bar_height + len(lines) * (line_height(caption_font) + 3)
    page = Image.new("RGB", (page_width, top + bottom + MARGIN), PAPER)
    draw = ImageDraw.Draw(page)
    for i, line in enumerate(title_lines):
        draw.text((MARGIN, MARGIN + i * (line_height(title_font) + 4)), line, INK, title_font)
    for i, text in enumerate(column_labels):
        draw.text((left + i * (panel + GAP) + panel / 2, top - 6), text, INK, label_font, anchor="ms")
    y = top
    for r, (row, height) in enumerate(zip(scaled, heights, strict=True)):
        if row_labels:
            draw.text((MARGIN, y + height / 2), row_labels[r], INK, label_font, anchor="lm")
        for c, cell in enumerate(row):
            if cell:
                x, under = left + c * (panel + GAP), y + above[r]
                page.paste(cell.picture, (x, under))
                if cell.heading:
                    draw.text((x, y), clip_text(cell.heading, label_font, panel), INK, label_font)
                for i, line in enumerate(lines_of(cell.caption)):
                    place = x + 1, under + cell.picture.height + 2 + i * caption_height  # some letters begin left of their place
                    draw.text(place, clip_text(line, caption_font, panel), FAINT, caption_font)
        y += height + GAP
    if bar:
        draw_bar(page, draw, bar, left, y, caption_font)
        y += bar_height
    for line in lines:
        draw.text((MARGIN, y), line, FAINT, caption_font)
        y += line_height(caption_font) + 3
    return page


def side_by_side(
    pictures: Sequence[Image.Image], labels: Sequence[str] = (), *, panel: int = 320, title: str = ""
) -> Image.Image:
    """Draw pictures in one row, with a label above each."""
    return sheet([[Cell(picture) for picture in pictures]], panel=panel, column_labels=labels, title=title)


def enlargement(picture: Image.Image) -> int:
    """Return the factor by which a picture is enlarged above a band, so that text fits the band: a whole one, 1 for most photos."""
    return math.ceil(_LEGIBLE / picture.width)


def enlarged(picture: Image.Image, factor: int) -> Image.Image:
    """Return the picture with each pixel as a square of so many pixels a side."""
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def captioned(picture: Image.Image, lines: Sequence[str] = (), bar: Bar | None = None) -> Image.Image:
    """Add a color bar and lines of text on a white band below a picture; the picture's own pixels stay unchanged."""
    side = min(picture.width, round(_LANDSCAPE * math.sqrt(picture.width * picture.height)))
    font = font_of(max(12, side // 45))
    beside = bar is not None and _label_start(bar, picture.width, font) + text_width(bar.label, font) + GAP <= picture.width
    if bar is not None and not beside:
        lines = [bar.label, *lines]
    wrapped = [part for line in lines for part in wrap_text(line, font, picture.width - 2 * GAP)]
    step = line_height(font) + 4
    height = GAP + step * (len(wrapped) + (bar is not None)) + GAP
    page = Image.new("RGB", (picture.width, picture.height + height), PAPER)
    page.paste(picture)
    draw = ImageDraw.Draw(page)
    top = picture.height + GAP
    if bar:
        _slim_bar(page, draw, bar, top, font, labeled=beside)
        top += step
    for number, line in enumerate(wrapped):
        draw.text((GAP, top + number * step), line, INK, font)
    return page


def _slim_bar(page: Image.Image, draw: ImageDraw.ImageDraw, bar: Bar, y: int, font: Font, labeled: bool) -> None:
    """Draw a color bar of one line at height y: the lowest value, the colors, the highest value and, if there is room, the label."""
    low, high = bar.ticks[0], bar.ticks[-1]
    height, width = line_height(font), _ramp_width(page.width)
    x = GAP + text_width(low, font) + GAP
    draw.text((GAP, y), low, INK, font)
    page.paste(_ramp(bar.colormap, width, height // 2), (x, y + height // 4))
    draw.text((x + width + GAP, y), high, INK, font)
    if labeled:
        draw.text((_label_start(bar, page.width, font), y), bar.label, FAINT, font)


def _label_start(bar: Bar, page: int, font: Font) -> int:
    """Return where the label of a slim bar begins on a page of this width."""
    return 5 * GAP + text_width(bar.ticks[0], font) + _ramp_width(page) + text_width(bar.ticks[-1], font)


def _ramp_width(page: int) -> int:
    return max(16, page // 4)


def _ramp(colormap: str, width: int, height: int) -> Image.Image:
    """Return the colors of a color map from left to right."""
    colors = colormaps.table(colormap)[np.linspace(0, 255, width).round().astype(int)]
    return Image.fromarray(np.repeat(colors[None], height, axis=0))


def draw_bar(page: Image.Image, draw: ImageDraw.ImageDraw, bar: Bar, x: int, y: int, font: Font) -> None:
    """Draw a color bar with its ticks and label at pixel (x, y) of a figure."""
    width = min(page.width - x - MARGIN, 420)
    page.paste(_ramp(bar.colormap, width, 14), (x, y))
    for i, text in enumerate(bar.ticks):
        share = i / max(1, len(bar.ticks) - 1)
        anchor = "la" if i == 0 else "ra" if i == len(bar.ticks) - 1 else "ma"
        draw.text((x + share * (width - 1), y + 17), text, INK, font, anchor=anchor)
    draw.text((x, y + 20 + line_height(font)), bar.label, FAINT, font)


def _to_width(picture: Image.Image, width: int) -> Image.Image:
    if picture.width == width:
        return picture
    return picture.resize((width, max(1, round(picture.height * width / picture.width))), Image.Resampling.LANCZOS)
