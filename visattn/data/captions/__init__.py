"""Captioned images."""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.data.captions.caption_sets import CaptionDataset as CaptionDataset, load_captions as load_captions
    from visattn.data.captions.captioned_images import SCENES as SCENES
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            ".captioned_images": ["SCENES"],
            ".caption_sets": ["CaptionDataset", "load_captions"],
        },
    )
