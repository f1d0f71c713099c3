"""Photos and arrays as upright pictures, whatever file they come from."""

from visattn.images.bands import Bands, bands_of
from visattn.images.loading import BACKGROUND, FORMATS, MAX_PIXELS, ImageFacts, as_array, as_photo, facts, load_image

__all__ = [
    "BACKGROUND",
    "FORMATS",
    "MAX_PIXELS",
    "Bands",
    "ImageFacts",
    "as_array",
    "as_photo",
    "bands_of",
    "facts",
    "load_image",
]
