"""Datasets of labeled or captioned images and generated scenes; the shipped photos and networks, and weights without a hub."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from visattn.core.loading.offline import OFFLINE_MODEL, offline_weights
from visattn.core.shipped import NETWORKS, PHOTOS, network_path, photo_path

if TYPE_CHECKING:
    from visattn.data import scenes as scenes
    from visattn.data.captions.readers import CaptionDataset as CaptionDataset, load_captions as load_captions
    from visattn.data.labeled.readers import (
        ArrayDataset as ArrayDataset,
        LabeledDataset as LabeledDataset,
        load_labeled as load_labeled,
    )

__all__ = [
    "NETWORKS",
    "OFFLINE_MODEL",
    "PHOTOS",
    "ArrayDataset",
    "CaptionDataset",
    "LabeledDataset",
    "load_captions",
    "load_labeled",
    "network_path",
    "offline_weights",
    "photo_path",
    "scenes",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name in ("ArrayDataset", "LabeledDataset", "load_labeled"):  # on first use: they import torch
        return getattr(import_module("visattn.data.labeled.readers"), name)
    if name in ("CaptionDataset", "load_captions"):
        return getattr(import_module("visattn.data.captions.readers"), name)
    if name == "scenes":
        return import_module("visattn.data.scenes")
    raise AttributeError(f"module 'visattn.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
