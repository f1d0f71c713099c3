"""Gallery picture of color profiles: ProPhoto RGB photos whose values are taken as sRGB, and the same photos converted."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from torch import nn

import visattn

sys.path.insert(0, str(Path(__file__).parents[2]))  # the profiles are written by code of the tests

from tests.images import icc
from visattn import data
from visattn.core.drawing.pages import Cell, sheet

PHOTOS = ("astronaut", "coffee", "rocket")


def profiles_sheet(model: nn.Module) -> Image.Image:
    """Draw each photo without and with color conversion, and the model's last-layer attention for both."""
    rows = []
    for name in PHOTOS:
        file, row = _in_prophoto(visattn.load_image(data.photo_path(name))), []
        for photo in (visattn.load_image(file, color_profile="ignore"), visattn.load_image(file)):
            found = visattn.explain(model, photo, method="attention")
            row += [Cell(photo), Cell(found.overlay(marks=False))]
        rows.append(row)
    titles = ["values taken as sRGB", "attention", "profile converted", "attention"]
    return sheet(rows, panel=240, column_labels=titles)


def _in_prophoto(photo: Image.Image) -> bytes:
    """Encode a photo as a PNG with ProPhoto RGB values and that profile; its colors stay the same."""
    light = icc.srgb_decoded(np.asarray(photo) / 255)
    wide = light @ np.array(icc.PRIMARIES["sRGB"]) @ np.linalg.inv(np.array(icc.PRIMARIES["ProPhoto RGB"]))
    numbers = (255 * wide.clip(0, 1) ** (1 / 1.796875)).round().astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(numbers).save(stream, "PNG", icc_profile=icc.matrix_profile("ProPhoto RGB", icc.curve(1.796875)))
    return stream.getvalue()
