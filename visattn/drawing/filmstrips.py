"""What a captioner looked at, word by word: the photo, then a panel for each word, as a page or as an animation.

In: a photo and an `AttentionMap` with the one axis `word`, of any captioner. Where words come from is not known here.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
import torch
from PIL import Image, ImageDraw

from visattn._support.checks import between, printable
from visattn.drawing.marks import outline
from visattn.drawing.pages import (
    FAINT,
    GAP,
    INK,
    MARGIN,
    PAPER,
    Bar,
    Cell,
    draw_bar,
    sheet,
)
from visattn.drawing.pictures import Picture, carrying
from visattn.drawing.sheets import Panels
from visattn.drawing.style import PAGE, Style, StyleOptions
from visattn.drawing.text import (
    clip_text,
    font_of,
    line_height,
    lines_of,
    text_width,
    wrap_text,
)
from visattn.errors import MapError, OptionError
from visattn.geometry import Box, Geometry
from visattn.maps import AttentionMap, Heatmap

_MOST, _WIDEST = 200, 1024  # words; pixels of a panel


def filmstrip(
    photo: object,
    attention_map: AttentionMap,
    geometry: Geometry,
    *,
    cells: Sequence[tuple[int, int] | None] = (),
    facts: Sequence[str] = (),
    panel: int = 160,
    columns: int | None = None,
    shared: bool = False,
    title: str = "",
    notes: Sequence[str] = (),
    **style: Unpack[StyleOptions],
) -> Picture:
    """The photo, then one panel for each word: the photo with that word's attention over it.

    Args:
        photo: The photo.
        attention_map: Map of one image with the one axis `word`; its labels are the words.
        geometry: Where the model's input lies on the photo.
        cells: For each word the place `(row, column)` that it took, as hard attention does, or None; it is drawn as a box.
        facts: For each word a line to write under it, for example its entropy, see `entropies`.
        panel: Width of a panel in pixels, 64 to 1024.
        columns: Panels in a row; chosen for few empty places by default.
        shared: Whether all words share one scale; each has its own by default, and its range is written under it.
        title: One line above.
        notes: Lines below.
        style: See `visattn.drawing.Style`; by default `opacity` is 0.6 and `interpolation` is `nearest`, which shows the places as they
            are; any other is stated on the page. A map whose mass is in one place is never smoothed.

    Returns:
        The page; a PNG of it carries how it was made. A word whose map is constant shows the untouched photo and says so; on a shared
        scale it has the color of its value.

    Raises:
        OptionError: If the map has other axes, a place lies outside its grid, there are not as many facts, cells or labels as words, or
            an option is out of range.
        ShapeError: If the geometry is of a photo of another size.
        MapError: If the map is made for an input of another size than the geometry's.

    Reference:
        Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044. Differs from the figures there, which are enlarged and blurred:
        places are shown as they are.
    """
    panels, strip, foot = _drawn(
        photo,
        attention_map,
        geometry,
        cells,
        facts,
        notes,
        panel=panel,
        shared=shared,
        style=Style(**PAGE | style),
    )
    strip = [Cell(panels.photo), *strip]
    across = min(range(4, 8), key=lambda count: (-len(strip) % count, -count)) if columns is None else columns
    if across < 1:
        raise OptionError(f"columns must be 1 or more, got {columns}. Leave it out to have them chosen.")
    rows: list[list[Cell | None]] = [list(strip[i : i + across]) for i in range(0, len(strip), across)]
    page = sheet(rows, panel=panel, title=printable(title), notes=foot, bar=panels.bar())
    return carrying(page, panels.provenance())


def animation(
    photo: object,
    attention_map: AttentionMap,
    geometry: Geometry,
    *,
    cells: Sequence[tuple[int, int] | None] = (),
    facts: Sequence[str] = (),
    panel: int = 320,
    shared: bool = False,
    title: str = "",
    notes: Sequence[str] = (),
    milliseconds: int = 800,
    **style: Unpack[StyleOptions],
) -> bytes:
    """The panels of `filmstrip` one after the other, each with its word on a white band below, as an animated WebP without loss.

    Args:
        photo: See `filmstrip`; here and below.
        attention_map: Map of one image with the one axis `word`.
        geometry: Where the model's input lies on the photo.
        cells: Places that words took.
        facts: A line for each word.
        panel: Width of the picture.
        shared: Whether all words share one scale.
        title: Written under the photo, which is the first frame.
        notes: Lines at the foot of every frame.
        milliseconds: How long each frame is shown, 20 to 60000.
        style: See `filmstrip`.

    Returns:
        The content of a file; it plays for ever.

    Raises:
        OptionError: See `filmstrip`; also if `milliseconds` is out of range.
        ShapeError: See `filmstrip`.
        MapError: See `filmstrip`.
    """
    duration = round(between(milliseconds, 20, 60_000, "milliseconds"))
    panels, strip, foot = _drawn(
        photo,
        attention_map,
        geometry,
        cells,
        facts,
        notes,
        panel=panel,
        shared=shared,
        style=Style(**PAGE | style),
    )
    bar = replace(panels.bar(), label=panels.heat.meaning)
    lines = max(len(lines_of(cell.caption)) for cell in strip)
    first = _frame(Cell(panels.photo, heading=printable(title)), "", lines, bar, foot)
    rest = [_frame(cell, f"{number} / {len(strip)}", lines, bar, foot) for number, cell in enumerate(strip, start=1)]
    stream = io.BytesIO()
    first.save(stream, "WEBP", save_all=True, append_images=rest, duration=duration, loop=0, lossless=True)
    return stream.getvalue()


def entropies(attention_map: AttentionMap, *, normalized: bool = False) -> list[float]:
    """How spread each word's attention is: `H = -sum_i p_i ln p_i`, where `p` is the word's map divided by its sum.

    Args:
        attention_map: Map of one image with the one axis `word`, of L places; values are 0 or more.
        normalized: Whether to divide by `ln L`: then 0 is one place and 1 all alike. Of a single place it is 0.

    Returns:
        A number for each word, in nats unless normalized; `0 ln 0` is 0.

    Raises:
        OptionError: If the map has other axes.
        MapError: If a value is negative, or a word has no mass.
    """
    _words(attention_map)
    mass = attention_map.values.detach().double().cpu().flatten(1)
    total = mass.sum(1, keepdim=True)
    if bool((mass < 0).any()) or not bool((total > 0).all()):
        raise MapError(
            f"an entropy needs values of 0 or more with a positive sum, {attention_map.meaning} has others. Use attention."
        )
    entropy = torch.special.entr(mass / total).sum(1).abs()  # of one place it would be -0
    return [float(value) for value in (entropy / np.log(max(2, mass.shape[1])) if normalized else entropy)]


def _words(attention_map: AttentionMap) -> list[str]:
    """The words, safe to write."""
    if attention_map.axes != ("word",):
        raise OptionError(
            f"a filmstrip needs a map with the one axis 'word', got {attention_map.axes}. Choose one entry of the others, for example "
            "map.at(batch=0)."
        )
    count = attention_map.values.shape[0]
    if not 1 <= count <= _MOST:
        raise OptionError(f"a filmstrip shows 1 to {_MOST} words, got {count}. Cut the caption.")
    words = attention_map.labels.get("word", tuple(f"word {i}" for i in range(count)))
    if len(words) != count:
        raise OptionError(f"labels must name {count} words, got {len(words)}. Give one for each word of the map.")
    return [printable(word) for word in words]


def _drawn(
    photo: object,
    attention_map: AttentionMap,
    geometry: Geometry,
    cells: Sequence[tuple[int, int] | None],
    facts: Sequence[str],
    notes: Sequence[str],
    *,
    panel: int,
    shared: bool,
    style: Style,
) -> tuple[Panels, list[Cell], list[str]]:
    """The panels, those of the words as they are shown, and what must be said of them below."""
    words = _words(attention_map)
    between(panel, 64, _WIDEST, "panel")
    for name, given in (("facts", facts), ("cells", cells)):
        if given and len(given) != len(words):
            raise OptionError(f"{name} must be one for each of the {len(words)} words, got {len(given)}.")
    panels = Panels(photo, attention_map, geometry, panel=panel, shared=("word",) if shared else (), style=style)
    interpolation = style.interpolation
    single = np.count_nonzero(panels.heat.grid, axis=(-2, -1)) == 1
    if interpolation != "nearest" and single.any():
        raw = attention_map.to_heatmap(panels.geometry, "nearest").values
        panels.heat = replace(panels.heat, values=np.where(single[:, None, None], raw, panels.heat.values))
    strip = []
    for number, word in enumerate(words):
        cell = panels.cell(word=number)
        lines = [line for line in (printable(facts[number]) if facts else "", cell.caption) if line]
        picture = cell.picture
        if cells and (place := cells[number]) is not None:
            picture = outline(picture, _box(panels, attention_map, place, f"cells[{number}]"))
        strip.append(Cell(picture, "\n".join(lines), word))
    grid = "{} x {}".format(*attention_map.layout.grid)
    said = [f"smoothed: {interpolation} between the centers of {grid} places"] * (interpolation != "nearest")
    said += ["not smoothed: maps of a single place"] * bool(said and single.any())
    said += ["box: the place that the word took"] * any(place is not None for place in cells)
    said += ["without color: what the model did not see"] * (panels.heat.seen != Box(0, 0, *panels.geometry.photo))
    return panels, strip, [*said, *map(printable, notes)]


def _box(panels: Panels, attention_map: AttentionMap, place: tuple[int, int], name: str) -> Heatmap:
    """The pixels of one place, as a mask."""
    (row, column), (rows, columns), box = place, attention_map.layout.grid, attention_map.layout.box
    if not (0 <= row < rows and 0 <= column < columns):
        raise OptionError(f"{name} must be a (row, column) of the grid of {rows} x {columns}, got {place}.")
    height, width = box.height / rows, box.width / columns
    corner = box.top + row * height, box.left + column * width
    top, left, bottom, right = map(int, panels.geometry.seen(Box(*corner, corner[0] + height, corner[1] + width)))
    heat = panels.heat.at(word=0)
    mask = np.zeros_like(heat.values)
    mask[top:bottom, left:right] = 1
    return replace(heat, values=mask)


def _frame(cell: Cell, number: str, lines: int, bar: Bar, notes: Sequence[str]) -> Image.Image:
    """A panel with a white band below: the word and its number, the lines of its caption, the color bar and notes."""
    width, height = cell.picture.size
    large, small = font_of(max(16, width // 16)), font_of(max(11, width // 26))
    word, line, inner = line_height(large) + 6, line_height(small) + 4, width - 2 * MARGIN
    feet = [part for note in notes for part in wrap_text(note, small, inner)]
    above = height + GAP + word + lines * line + GAP
    foot = above + 18 + 2 * line + GAP
    page = Image.new("RGB", (width, foot + len(feet) * line + GAP), PAPER)
    page.paste(cell.picture)
    draw = ImageDraw.Draw(page)
    room = max(0, inner - text_width(number, small) - GAP)
    draw.text((MARGIN, height + GAP), clip_text(cell.heading, large, room), INK, large)
    draw.text((width - MARGIN, height + GAP + 2), number, FAINT, small, anchor="ra")
    for i, text in enumerate(lines_of(cell.caption)):
        draw.text((MARGIN, height + GAP + word + i * line), clip_text(text, small, inner), FAINT, small)
    draw_bar(page, draw, bar, MARGIN, above, small)
    for i, text in enumerate(feet):
        draw.text((MARGIN, foot + i * line), text, FAINT, small)
    return page
