"""Labeled images for training and testing."""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.data.labeled.arrays import ArrayDataset as ArrayDataset
    from visattn.data.labeled.labeled_sets import (
        KNOWN as KNOWN,
        PUBLISHED as PUBLISHED,
        LabeledDataset as LabeledDataset,
        load_labeled as load_labeled,
    )
    from visattn.data.labeled.own import OwnDataset as OwnDataset
    from visattn.data.labeled.subsets import held_out as held_out
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            ".arrays": ["ArrayDataset"],
            ".own": ["OwnDataset"],
            ".labeled_sets": ["KNOWN", "LabeledDataset", "PUBLISHED", "load_labeled"],
            ".subsets": ["held_out"],
        },
    )
