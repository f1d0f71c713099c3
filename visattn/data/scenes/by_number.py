"""Scenes by number, as images to explain: `scene:7`."""

from __future__ import annotations

import hashlib

from PIL import Image

from visattn._support.checks import printable, whole_number
from visattn.core.images import ImageFacts, stating
from visattn.data.scenes.generator import Scenes
from visattn.errors import ImageError

_SIDE = 224  # pixels


def scene_image(text: str) -> Image.Image:
    """Return the scene of a number, with seed 0, as an RGB image that states its origin.

    Raises:
        ImageError: If the text is not a whole number of at most nine digits.
    """
    number = whole_number(text)
    if number is None or number < 0:
        raise ImageError(f"scene:{printable(text)}: a scene is a whole number of at most nine digits; pass for example scene:7")
    pixels = Scenes(number + 1, (_SIDE, _SIDE)).scene(number).image
    return stating(Image.fromarray(pixels), ImageFacts(f"scene:{number}", hashlib.sha256(pixels.tobytes()).hexdigest()))
