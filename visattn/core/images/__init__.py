"""Image loading: photo files and arrays become upright RGB images."""

from visattn._support.types import MAX_PIXELS
from visattn.core.images.loading import (
    BACKGROUND,
    FORMATS,
    LARGEST,
    ImageFacts,
    as_array,
    as_photo,
    decode,
    image_facts,
    load_file,
    stating,
)

__all__ = [
    "BACKGROUND",
    "FORMATS",
    "LARGEST",
    "MAX_PIXELS",
    "ImageFacts",
    "as_array",
    "as_photo",
    "decode",
    "image_facts",
    "load_file",
    "stating",
]
