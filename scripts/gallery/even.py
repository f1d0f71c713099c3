"""Gallery picture of a nearly even map: uncolored by default, and what stretching its differences over all colors would show."""

from __future__ import annotations

import warnings

import torch
from PIL import Image
from train_gates import gated

import visattn
from visattn import data, models
from visattn.core.drawing.pages import Cell, sheet
from visattn.core.maps.scaling import range_words


def even_sheet() -> Image.Image:
    """Draw the gates of a CNN before its training, by default and stretched, and those of one that was trained."""
    torch.manual_seed(0)
    untrained = models.resnet18(attention="bam", num_classes=10, in_channels=3).eval()
    cells = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of assumed preprocessing, and of the map that is nearly even
        for name, model, style in (
            ("BAM before training", untrained, {}),
            ("the same, normalize='minmax'", untrained, {"normalize": "minmax"}),
            ("CBAM, trained", gated(), {}),
        ):
            found = visattn.explain(model, data.photo_path("rocket"), method="gates", img_size=224)
            values = found.map.values
            said = range_words(float(values.min()), float(values.max()))
            cells.append(Cell(found.overlay(**style), f"gates {said}", name))  # type: ignore[arg-type]
    return sheet([cells], panel=300, title="a nearly even map has no colors: gates of a CNN")
