"""Datasets of labeled or captioned images and generated scenes; the shipped photos and networks, and weights without a hub."""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.core.loading.networks import CAPTIONERS as CAPTIONERS, NETWORKS as NETWORKS, network_path as network_path
    from visattn.core.loading.offline import OFFLINE_MODEL as OFFLINE_MODEL, offline_weights as offline_weights
    from visattn.core.shipped import PHOTOS as PHOTOS, photo_path as photo_path
    from visattn.data import scenes as scenes
    from visattn.data.captions import CaptionDataset as CaptionDataset, load_captions as load_captions
    from visattn.data.image_dataset import ImageDataset as ImageDataset
    from visattn.data.labeled import ArrayDataset as ArrayDataset, LabeledDataset as LabeledDataset, load_labeled as load_labeled
    from visattn.data.segmented import (
        SegmentedPhoto as SegmentedPhoto,
        SegmentedPhotos as SegmentedPhotos,
        load_segmented as load_segmented,
    )
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "visattn.core.loading.offline": ["OFFLINE_MODEL", "offline_weights"],
            "visattn.core.loading.networks": ["CAPTIONERS", "NETWORKS", "network_path"],
            "visattn.core.shipped": ["PHOTOS", "photo_path"],
            ".": ["scenes"],
            ".captions": ["CaptionDataset", "load_captions"],
            ".segmented": ["SegmentedPhoto", "SegmentedPhotos", "load_segmented"],
            ".labeled": ["ArrayDataset", "LabeledDataset", "load_labeled"],
            ".image_dataset": ["ImageDataset"],
        },
    )
