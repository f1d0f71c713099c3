"""Photos and weights to try the toolkit on."""

from visattn.data._offline import OFFLINE_MODEL, OFFLINE_NAME, offline_weights
from visattn.data._photos import PHOTOS, photo_path

__all__ = ["OFFLINE_MODEL", "OFFLINE_NAME", "PHOTOS", "offline_weights", "photo_path"]
