"""Gallery picture of a transparent layer: over a checkerboard, over a map of the photo's edges, and over the photo."""

from __future__ import annotations

import numpy as np
from PIL import Image
from torch import nn

import visattn
from visattn import data
from visattn._support.opencv import cv2
from visattn.core.drawing.pages import Cell, sheet

_SQUARE = 16  # pixels


def layer_sheet(model: nn.Module) -> Image.Image:
    """Draw the layer of a photo over three grounds, and the overlay of the same map."""
    photo = visattn.load_image(data.photo_path("chelsea"))
    explanation = visattn.explain(model, photo, method="attention", head=1)
    layer = explanation.overlay(transparent=True)
    rows, columns = np.indices((photo.height, photo.width)) // _SQUARE
    squares = Image.fromarray(np.where((rows + columns) % 2, 204, 255).astype(np.uint8))
    edges = Image.fromarray(255 - cv2.Canny(np.asarray(photo), 60, 160))
    grounds = [Image.alpha_composite(ground.convert("RGBA"), layer).convert("RGB") for ground in (squares, edges, photo)]
    cells = [Cell(picture) for picture in (*grounds, explanation.overlay())]
    return sheet([cells], panel=300, column_labels=["the layer", "over a drawing", "over the photo", "the overlay"])
