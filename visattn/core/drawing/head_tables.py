"""Figure of a number for each attention head: a row for each layer, a colored cell for each head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from visattn.core.drawing.overlays import colorize
from visattn.core.drawing.pages import Bar, Cell, sheet

__all__ = ["head_table"]

_SIDE = 56  # of a cell in pixels
_COLORS = "blue-white-red"


def head_table(
    numbers: Mapping[tuple[str, int], float],
    *,
    meaning: str,
    title: str = "",
    notes: Sequence[str] = (),
    marked: Sequence[tuple[str, int]] = (),
) -> Image.Image:
    """Draw a signed number for each head by its color, and below it as text.

    Args:
        numbers: Number of each head, by layer and number of the head.
        meaning: Quantity of the numbers, below the color bar.
        title: Line above.
        notes: Lines below.
        marked: Heads whose number gets a star.
    """
    layers = list(dict.fromkeys(layer for layer, _ in numbers))
    most = max(head for _, head in numbers) + 1
    limit = max((abs(number) for number in numbers.values()), default=0.0) or 1.0
    scale = np.array([[-limit, *numbers.values(), limit]], np.float32)
    colors = colorize(scale, normalize="symmetric", colormap=_COLORS)
    tile = {key: colors.crop((at, 0, at + 1, 1)).resize((_SIDE, _SIDE * 3 // 5)) for at, key in enumerate(numbers, start=1)}
    rows: list[list[Cell | None]] = [
        [
            Cell(tile[layer, head], _short(numbers[layer, head]) + "*" * ((layer, head) in marked))
            if (layer, head) in tile
            else None
            for head in range(most)
        ]
        for layer in layers
    ]
    bar = Bar(_COLORS, (f"{-limit:.2g}", "0", f"{limit:.2g}"), meaning)
    heads = [str(head) for head in range(most)]
    return sheet(rows, panel=_SIDE, title=title, notes=notes, row_labels=layers, column_labels=heads, bar=bar)


def _short(number: float) -> str:
    """Return a number in at most six letters."""
    return f"{number:+.2f}" if 0.005 <= abs(number) < 100 else f"{number:+.0e}" if number else "0"
