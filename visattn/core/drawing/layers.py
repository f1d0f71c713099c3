"""Transparent layers: the pixels that, laid over a photo, give the picture that was drawn on it."""

from __future__ import annotations

import numpy as np
from PIL import Image

_ROUNDING = 1.01  # levels by which a color, times its opacity, differs from what was drawn on black


def layer_between(on_black: Image.Image, on_white: Image.Image, colors: Image.Image, opacity: float | None = None) -> Image.Image:
    """Find the layer that gives one picture on black and the other on white.

    What the background adds to a pixel is what the layer lets through. So the layer holds everything that was drawn, soft edges of lines
    and darkened holes too.

    Args:
        on_black: RGB picture on a black background.
        on_white: The same on white.
        colors: Colors of the pixels without marks. Dark pixels of `on_black` would give them inexactly.
        opacity: Opacity of the pixels without marks, if they all have one; what was drawn gives it to one level of 255.

    Returns:
        RGBA picture of their size.
    """
    black, white = np.asarray(on_black).astype(np.int32), np.asarray(on_white).astype(np.int32)
    alpha = (255 - (white - black).max(-1)).clip(max=255)
    if opacity is not None:
        level = round(255 * opacity)
        alpha[np.abs(alpha - level) <= 1] = level
    share = alpha[..., None]
    plain = np.asarray(colors).astype(np.int32)
    marked = (np.abs(plain * share / 255 - black) > _ROUNDING).any(-1, keepdims=True)
    drawn = np.where(marked, (black * 255 / share.clip(1)).round().clip(max=255), plain)
    return Image.fromarray(np.concatenate([np.where(share > 0, drawn, 0), share], -1).astype(np.uint8), "RGBA")
