"""Attention matrix of one head as a picture: rows are queries, columns are keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from visattn.core.drawing.overlays import colorize
from visattn.core.drawing.pages import Bar, Cell, sheet

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["matrix_page"]


def matrix_page(
    weights: NDArray[np.float32], prefix: Sequence[str], *, title: str = "", notes: Sequence[str] = (), side: int = 900
) -> Image.Image:
    """Draw the query x key matrix of one head with a color bar.

    Args:
        weights: Attention weights `(Q, K)`.
        prefix: Names of the tokens before the patches.
        title: Line above the matrix.
        notes: Lines below the matrix.
        side: Largest side in pixels. A larger matrix is averaged over blocks; a smaller one is enlarged by an integer factor.

    Returns:
        The figure.
    """
    queries, keys = weights.shape
    shrink = -(-max(queries, keys) // side)
    if shrink > 1:
        padded = np.pad(weights, ((0, -queries % shrink), (0, -keys % shrink)), constant_values=np.nan)
        blocks = padded.reshape(padded.shape[0] // shrink, shrink, padded.shape[1] // shrink, shrink)
        weights = np.nanmean(blocks, axis=(1, 3)).astype(np.float32)
        notes = (f"each pixel is the mean of {shrink} x {shrink} weights", *notes)
    enlarge = max(1, side // max(weights.shape))
    low, high = float(weights.min()), float(np.percentile(weights, 99.5))
    high = high if high > low else float(weights.max())
    picture = (
        colorize(np.minimum(weights, high), normalize="minmax", colormap="viridis")
        if weights.min() < high
        else Image.new("RGB", weights.shape[::-1])
    )
    picture = picture.resize((picture.width * enlarge, picture.height * enlarge), Image.Resampling.NEAREST)
    ticks = (f"{low:.2g}", f"{(low + high) / 2:.2g}", f">= {high:.2g}")
    order = f"{', '.join(prefix)}, then patches in raster order" if prefix else "patches in raster order"
    notes = (f"rows: queries, top to bottom; columns: keys, left to right; both {order}", *notes)
    return sheet([[Cell(picture)]], panel=picture.width, title=title, notes=notes, bar=Bar("viridis", ticks, "attention"))
