"""Figures of learned parameters: kernels of a first layer with their principal components, and similarities of position embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from visattn.core.drawing.overlays import colorize
from visattn.core.drawing.pages import Bar, Cell, sheet

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["kernel_page", "position_page"]

_MOST, _COMPONENTS = 64, 28  # kernels and principal components that are shown
_ACROSS, _TILE = 16, 56  # of them in a row; their width in pixels
_QUERIES = 7  # patches along a side of the grid whose similarities are shown, at most


def kernel_page(kernels: NDArray[np.float32], *, title: str = "", notes: Sequence[str] = ()) -> Image.Image:
    """Draw kernels, each on its own scale around gray for zero, and below them their principal components if there are more kernels.

    Args:
        kernels: `(O, C, height, width)` weights of O kernels of C channels: 3 are drawn as red, green and blue, of others the mean.
        title: Line above the kernels.
        notes: Lines below.
    """
    shown = min(len(kernels), _MOST)
    rows = _rows([_tile(kernel) for kernel in kernels[:shown]])
    lines = [*notes, f"the first {shown} of {len(kernels)} kernels, each on its own scale; gray is zero"]
    lines += [] if kernels.shape[1] == 3 else [f"each pixel: the mean over {kernels.shape[1]} channels"]
    flat = kernels.reshape(len(kernels), -1).astype(np.float64)
    if len(kernels) > _COMPONENTS and flat.shape[1] > _COMPONENTS:
        _, singular, components = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
        share = (singular[:_COMPONENTS] ** 2).sum() / (singular**2).sum()
        pictures = [_tile(one.reshape(kernels.shape[1:])) for one in components[:_COMPONENTS]]
        rows += [[Cell(Image.new("RGB", (_TILE, 8), "white"))], *_rows(pictures)]
        lines.append(f"below: the first {_COMPONENTS} principal components of all kernels, {share:.0%} of their variance")
    return sheet(rows, panel=_TILE, title=title, notes=lines)


def position_page(similarities: NDArray[np.float32], *, title: str = "", notes: Sequence[str] = ()) -> Image.Image:
    """Draw how alike the position embedding of some patches is to those of all patches, arranged as the patches are.

    Args:
        similarities: `(rows, columns, rows, columns)` cosine similarities of each patch with all patches.
        title: Line above.
        notes: Lines below.
    """
    rows, columns = similarities.shape[:2]
    at = [np.unique(np.linspace(0, side - 1, min(side, _QUERIES)).round().astype(int)) for side in (rows, columns)]
    low, high = float(similarities.min()), float(similarities.max())
    cells: list[list[Cell | None]] = []
    for row in at[0]:
        line: list[Cell | None] = []
        for column in at[1]:
            values = (similarities[row, column] - low) / max(high - low, 1e-12)
            picture = colorize(values.astype(np.float32), normalize="none", colormap="viridis")
            line.append(Cell(picture.resize((96, round(96 * rows / columns)), Image.Resampling.NEAREST)))
        cells.append(line)
    bar = Bar("viridis", (f"{low:.2g}", f"{(low + high) / 2:.2g}", f"{high:.2g}"), "cosine similarity")
    lines = [*notes, "each panel: one patch against all; panels lie as their patches do"]
    return sheet(cells, panel=96, title=title, notes=lines, bar=bar)


def _rows(pictures: Sequence[Image.Image]) -> list[list[Cell | None]]:
    return [[Cell(one) for one in pictures[i : i + _ACROSS]] for i in range(0, len(pictures), _ACROSS)]


def _tile(kernel: NDArray[np.floating]) -> Image.Image:
    """Return a kernel `(C, height, width)` as a picture, on its own scale around gray."""
    channels = kernel if len(kernel) == 3 else np.repeat(kernel.mean(0, keepdims=True), 3, 0)
    most = max(float(np.abs(channels).max()), 1e-12)
    pixels = ((channels / most + 1) / 2 * 255).round().astype(np.uint8).transpose(1, 2, 0)
    height, width = pixels.shape[:2]
    size = (round(_TILE * width / max(height, width)), round(_TILE * height / max(height, width)))
    return Image.fromarray(np.ascontiguousarray(pixels)).resize(size, Image.Resampling.NEAREST)
