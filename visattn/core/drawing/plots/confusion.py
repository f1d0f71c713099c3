"""Plot of a confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from visattn.core.drawing.plots import figures
from visattn.core.provenance import Provenance

LARGEST = 60  # classes that have room for their names
_COUNTED = 20  # classes whose cells have room for a number
_SHORT = 24  # characters of a name


def confusion(counts: ArrayLike, names: Sequence[str], title: str, provenance: Provenance) -> bytes:
    """Plot how often each class was predicted for the images of each true class.

    Args:
        counts: `(classes, classes)`, a row for each true class.
        names: Names of the classes, at most `LARGEST`.
        title: Title of the figure.
        provenance: Provenance of the training run.

    Returns:
        A PNG with its provenance. Colors are shares of the images of a class, so a row adds up to 1; the numbers are counts.
    """
    table = np.asarray(counts, dtype=float)
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    short = [name if len(name) <= _SHORT else f"{name[: _SHORT - 1]}…" for name in names]
    side = 3.2 + 0.34 * len(names) + 0.07 * max(map(len, short))
    right = int(np.trace(table))
    figure = figures.figure(title, f"{right:,} of {int(table.sum()):,} test images on the diagonal", side + 0.8, side)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), short, rotation=90, fontsize=8, parse_math=False)
    axes.set_yticks(range(len(names)), short, fontsize=8, parse_math=False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if len(names) <= _COUNTED:
        for row, column in zip(*np.nonzero(table), strict=True):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{int(table[row, column])}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image, ax=axes, label="share of the class", fraction=0.04)
    return figures.png(figure, provenance)
