"""Photos and weights to try the toolkit on, and pictures with labels or captions to learn from."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from visattn.data.shipped import PHOTOS, photo_path
from visattn.data.weights.offline import OFFLINE_MODEL, OFFLINE_NAME, offline_weights

if TYPE_CHECKING:
    from visattn.data import scenes as scenes
    from visattn.data.captions.readers import Captioned as Captioned, read_captions as read_captions
    from visattn.data.labeled.readers import ArrayPictures as ArrayPictures, Labeled as Labeled, read as read

__all__ = [
    "OFFLINE_MODEL",
    "OFFLINE_NAME",
    "PHOTOS",
    "ArrayPictures",
    "Captioned",
    "Labeled",
    "offline_weights",
    "photo_path",
    "read",
    "read_captions",
    "scenes",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name in ("ArrayPictures", "Labeled", "read"):  # on first use: they import torch
        return getattr(import_module("visattn.data.labeled.readers"), name)
    if name in ("Captioned", "read_captions"):
        return getattr(import_module("visattn.data.captions.readers"), name)
    if name == "scenes":
        return import_module("visattn.data.scenes")
    raise AttributeError(f"module 'visattn.data' has no attribute {name!r}")
