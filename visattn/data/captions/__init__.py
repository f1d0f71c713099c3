"""Captioned images."""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.data.captions.pictures import SCENES as SCENES
    from visattn.data.captions.readers import CaptionDataset as CaptionDataset, load_captions as load_captions
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            ".pictures": ["SCENES"],
            ".readers": ["CaptionDataset", "load_captions"],
        },
    )
