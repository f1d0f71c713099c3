"""Image loading: photo files and arrays become upright RGB images."""

from visattn._support.types import MAX_PIXELS
from visattn.images.bands import Bands, bands_of
from visattn.images.loading import BACKGROUND, FORMATS, ImageFacts, as_array, as_photo, image_facts, load_image

__all__ = [
    "BACKGROUND",
    "FORMATS",
    "MAX_PIXELS",
    "Bands",
    "ImageFacts",
    "as_array",
    "as_photo",
    "bands_of",
    "image_facts",
    "load_image",
]
