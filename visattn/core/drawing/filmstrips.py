"""Attention of a captioner word by word: the photo, then one panel per word, as a figure or an animation.

Input is a photo and an `AttentionMap` whose only axis is `word`; any captioner can make it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch
from PIL import Image, ImageDraw

from visattn._support.checks import between, printable
from visattn._support.options import with_options
from visattn.core.drawing.marks import draw_box, outline
from visattn.core.drawing.pages import (
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
from visattn.core.drawing.pictures import Picture, carrying
from visattn.core.drawing.sheets import Panels
from visattn.core.drawing.style import Style
from visattn.core.drawing.style_options import PAGE, StyleOptions
from visattn.core.drawing.text import (
    clip_text,
    font_of,
    line_height,
    lines_of,
    text_width,
    wrap_text,
)
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, Heatmap
from visattn.errors import MapError, OptionError

__all__ = ["animation", "filmstrip"]

_MOST, _WIDEST = 200, 1024  # largest number of words; largest panel width in pixels


class StripOptions(StyleOptions, total=False):
    """Options of a filmstrip and its animation.

    Attributes:
        chosen_cells: For each word the cell `(row, column)` that hard attention chose, or None; it is drawn as a box.
        windows: For each word the window outside which local attention cannot look, in pixels of the model's input; it is drawn as a box.
        word_notes: For each word a line to write under it, for example its entropy, see `entropies`.
        strengths: For each word a number from 0 to 1: how visible its map is. At 0 its panel shows the photo alone. By default all are 1.
        shared_scale: Whether all words share one color scale. By default each has its own, with its range written under it.
        notes: Lines below the panels.
    """

    chosen_cells: Sequence[tuple[int, int] | None]
    windows: Sequence[Box]
    word_notes: Sequence[str]
    strengths: Sequence[float]
    shared_scale: bool
    notes: Sequence[str]


@with_options(StripOptions)
def filmstrip(
    photo: object,
    attention_map: AttentionMap,
    geometry: Geometry,
    *,
    panel: int = 160,
    columns: int | None = None,
    title: str = "",
    **options: Unpack[StripOptions],
) -> Picture:
    """Draw the photo, then one panel per word: the photo under the attention map of that word.

    Args:
        photo: The photo.
        attention_map: Map of one image whose only axis is `word`; its labels are the words.
        geometry: Position of the model's input on the photo.
        panel: Width of a panel in pixels, 64 to 1024.
        columns: Panels per row; by default chosen so that few cells of the figure stay empty.
        title: Line above the panels.
        options: See `StripOptions`, and `visattn.drawing.Style`. By default `opacity` is 0.6 and `interpolation` is `nearest`, which shows
            the grid unchanged; any other interpolation is stated on the figure. A map with a single nonzero cell is never smoothed.

    Returns:
        The figure; PNG files of it store its provenance. A word with a constant map shows the unchanged photo and a note; on a shared
        scale it has the color of its value.

    Raises:
        OptionError: If the map has other axes, a cell lies outside its grid, the number of word_notes, chosen_cells, windows or labels
            differs from the number of words, or an option is out of range.
        ShapeError: If the geometry belongs to a photo of another size.
        MapError: If the map belongs to an input of another size than the geometry's.

    Reference:
        Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044. Differs from the figures there, which are upsampled and
        blurred: the cells are shown unchanged.
    """
    panels, strip, foot = _drawn(photo, attention_map, geometry, panel, options)
    strip = [Cell(panels.photo), *strip]
    across = min(range(4, 8), key=lambda count: (-len(strip) % count, -count)) if columns is None else columns
    if across < 1:
        raise OptionError(f"columns must be 1 or more, got {columns}. Leave it out to have them chosen.")
    rows: list[list[Cell | None]] = [list(strip[i : i + across]) for i in range(0, len(strip), across)]
    page = sheet(rows, panel=panel, title=printable(title), notes=foot, bar=panels.bar())
    return carrying(page, panels.provenance())


@with_options(StripOptions)
def animation(
    photo: object,
    attention_map: AttentionMap,
    geometry: Geometry,
    *,
    panel: int = 320,
    title: str = "",
    milliseconds: int = 800,
    **options: Unpack[StripOptions],
) -> bytes:
    """Draw the panels of `filmstrip` as frames of a lossless animated WebP, each with its word on a white band below.

    Args:
        photo: See `filmstrip`.
        attention_map: See `filmstrip`.
        geometry: See `filmstrip`.
        panel: Width of a frame in pixels, 64 to 1024.
        title: Text under the photo, which is the first frame.
        milliseconds: Duration of each frame, 20 to 60000.
        options: See `filmstrip`; the notes are at the bottom of every frame.

    Returns:
        Content of the WebP file, which loops forever.

    Raises:
        OptionError: See `filmstrip`; also if `milliseconds` is out of range.
        ShapeError: See `filmstrip`.
        MapError: See `filmstrip`.
    """
    duration = round(between(milliseconds, 20, 60_000, "milliseconds"))
    panels, strip, foot = _drawn(photo, attention_map, geometry, panel, options)
    bar = replace(panels.bar(), label=panels.heat.meaning)
    lines = max(len(lines_of(cell.caption)) for cell in strip)
    first = _frame(Cell(panels.photo, heading=printable(title)), "", lines, bar, foot)
    rest = [_frame(cell, f"{number} / {len(strip)}", lines, bar, foot) for number, cell in enumerate(strip, start=1)]
    stream = io.BytesIO()
    first.save(stream, "WEBP", save_all=True, append_images=rest, duration=duration, loop=0, lossless=True)
    return stream.getvalue()


def entropies(attention_map: AttentionMap, *, normalized: bool = False) -> list[float]:
    """Compute the entropy of each word's attention: `H = -sum_i p_i ln p_i`, where `p` is the word's map divided by its sum.

    Args:
        attention_map: Map of one image whose only axis is `word`, with L cells; values are at least 0.
        normalized: Whether to divide by `ln L`: then 0 means a single cell and 1 uniform attention. For L = 1 the result is 0.

    Returns:
        One number per word, in nats unless normalized; `0 ln 0` counts as 0.

    Raises:
        OptionError: If the map has other axes.
        MapError: If a value is negative, or the map of a word is zero everywhere.
    """
    _words(attention_map)
    mass = attention_map.values.detach().double().cpu().flatten(1)
    total = mass.sum(1, keepdim=True)
    if bool((mass < 0).any()) or not bool((total > 0).all()):
        raise MapError(
            f"entropies need values of at least 0 with a positive sum, but the map ({attention_map.meaning}) has others. "
            "Use attention weights."
        )
    entropy = torch.special.entr(mass / total).sum(1).abs()  # a single cell would give -0.0
    return [float(value) for value in (entropy / np.log(max(2, mass.shape[1])) if normalized else entropy)]


def _words(attention_map: AttentionMap) -> list[str]:
    """Return the words in printable form."""
    if attention_map.axes != ("word",):
        raise OptionError(
            f"a filmstrip needs a map whose only axis is 'word', got {attention_map.axes}. Select one entry of each other axis, for "
            "example map.at(batch=0)."
        )
    count = attention_map.values.shape[0]
    if not 1 <= count <= _MOST:
        raise OptionError(f"a filmstrip shows 1 to {_MOST} words, got {count}. Pass a map of fewer words.")
    words = attention_map.labels.get("word", tuple(f"word {i}" for i in range(count)))
    if len(words) != count:
        raise OptionError(f"labels must name {count} words, got {len(words)}. Give one label per word.")
    return [printable(word) for word in words]


def _drawn(
    photo: object, attention_map: AttentionMap, geometry: Geometry, panel: int, options: StripOptions
) -> tuple[Panels, list[Cell], list[str]]:
    """Draw the panels; return them with the cells of the words and the notes below the figure."""
    chosen_cells, word_notes = options.get("chosen_cells", ()), options.get("word_notes", ())
    windows = options.get("windows", ())
    strengths, notes, shared_scale = options.get("strengths", ()), options.get("notes", ()), options.get("shared_scale", False)
    own = StripOptions.__annotations__.keys() - StyleOptions.__annotations__.keys()
    chosen: dict[str, Any] = {**PAGE} | {name: value for name, value in options.items() if name not in own}
    style = Style(**chosen).opaque()
    words = _words(attention_map)
    between(panel, 64, _WIDEST, "panel")
    each = {"word_notes": word_notes, "chosen_cells": chosen_cells, "windows": windows, "strengths": strengths}
    for name, given in each.items():
        if given and len(given) != len(words):
            raise OptionError(f"{name} must have one entry for each of the {len(words)} words, got {len(given)}.")
    for number, strength in enumerate(strengths):
        between(strength, 0, 1, f"strengths[{number}]")
    panels = Panels(photo, attention_map, geometry, panel=panel, shared_axes=("word",) if shared_scale else (), style=style)
    interpolation = style.interpolation
    single = np.count_nonzero(panels.heat.grid, axis=(-2, -1)) == 1
    if interpolation != "nearest" and single.any():
        raw = attention_map.to_heatmap(panels.geometry, "nearest").values
        panels.heat = replace(panels.heat, values=np.where(single[:, None, None], raw, panels.heat.values))
    strip = []
    for number, word in enumerate(words):
        cell = panels.cell(word=number)
        lines = [line for line in (printable(word_notes[number]) if word_notes else "", cell.caption) if line]
        picture = Image.blend(panels.photo, cell.picture, strengths[number]) if strengths else cell.picture
        if chosen_cells and (place := chosen_cells[number]) is not None:
            picture = outline(picture, _box(panels, attention_map, place, f"chosen_cells[{number}]"), smallest=1)
        if windows:
            picture = draw_box(picture, panels.geometry.box_to_photo(windows[number]), seen=panels.heat.seen)
        strip.append(Cell(picture, "\n".join(lines), word))
    grid = "{} x {}".format(*attention_map.layout.grid)
    said = [f"smoothed: {interpolation} interpolation between the centers of {grid} cells"] * (interpolation != "nearest")
    said += ["not smoothed: maps with a single nonzero cell"] * bool(said and single.any())
    said += ["box: the cell that hard attention chose"] * any(place is not None for place in chosen_cells)
    said += ["box: the window of the word, outside which it cannot attend"] * bool(windows)
    said += ["no color: outside the model's input"] * (panels.heat.seen != Box(0, 0, *panels.geometry.photo))
    return panels, strip, [*said, *map(printable, notes)]


def _box(panels: Panels, attention_map: AttentionMap, place: tuple[int, int], name: str) -> Heatmap:
    """Return the pixels of one cell as a mask."""
    (row, column), (rows, columns), box = place, attention_map.layout.grid, attention_map.layout.box
    if not (0 <= row < rows and 0 <= column < columns):
        raise OptionError(f"{name} must be a (row, column) inside the {rows} x {columns} grid, got {place}.")
    height, width = box.height / rows, box.width / columns
    corner = box.top + row * height, box.left + column * width
    top, left, bottom, right = map(int, panels.geometry.seen(Box(*corner, corner[0] + height, corner[1] + width)))
    heat = panels.heat.at(word=0)
    mask = np.zeros_like(heat.values)
    mask[top:bottom, left:right] = 1
    return replace(heat, values=mask)


def _frame(cell: Cell, number: str, lines: int, bar: Bar, notes: Sequence[str]) -> Image.Image:
    """Draw a panel with a white band below: the word and its number, the lines of its caption, the color bar and notes."""
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
