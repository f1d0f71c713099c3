"""Photos with segmentations: VOC 2012, ImageNet-Segmentation, and folders of images and annotations."""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.data.segmented.reading import load_segmented as load_segmented
    from visattn.data.segmented.segmented_photos import SegmentedPhoto as SegmentedPhoto, SegmentedPhotos as SegmentedPhotos
else:
    __getattr__, __dir__, __all__ = face(
        __name__, {".reading": ["load_segmented"], ".segmented_photos": ["SegmentedPhoto", "SegmentedPhotos"]}
    )
