"""Random crops of a photo, so that few photos give many images."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from PIL import Image

from visattn.core.images import ImageFacts, image_facts, stating
from visattn.errors import OptionError

_AREA, _RATIO = (0.25, 0.8), (3 / 4, 4 / 3)  # of the photo's area and shape


def crops_of(photo: Image.Image, count: int, *, seed: int = 0) -> list[Image.Image]:
    """Cut random parts out of a photo, each a quarter to four fifths of its area.

    Args:
        photo: An RGB photo.
        count: Number of crops.
        seed: Seed.

    Returns:
        The crops; `NAME crop 1` is the name of the first.

    Raises:
        OptionError: If the count is negative.
    """
    if count < 0:
        raise OptionError(f"count must be 0 or more, got {count}.")
    random, facts = np.random.default_rng(seed), image_facts(photo)
    made = []
    for number in range(count):
        area = random.uniform(*_AREA) * photo.width * photo.height
        ratio = math.exp(random.uniform(math.log(_RATIO[0]), math.log(_RATIO[1]))) * photo.width / photo.height
        width = min(photo.width, max(1, round(math.sqrt(area * ratio))))
        height = min(photo.height, max(1, round(math.sqrt(area / ratio))))
        left, top = (int(random.integers(0, whole - part + 1)) for whole, part in ((photo.width, width), (photo.height, height)))
        part = photo.crop((left, top, left + width, top + height))
        digest = hashlib.sha256(f"{facts.sha256} {left} {top} {width} {height}".encode()).hexdigest()
        made.append(stating(part, ImageFacts(f"{facts.name} crop {number + 1}", digest, facts.notes)))
    return made
