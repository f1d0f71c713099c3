"""Photos and small trained networks that come with the package.

`LICENSES.md` in the folder of photos lists their licenses; each network has a model card, `README.md`.
"""

from __future__ import annotations

from pathlib import Path

from visattn._support.checks import one_of

__all__ = ["NETWORKS", "PHOTOS", "network_path", "photo_path"]

PHOTOS = {"astronaut": "astronaut.png", "coffee": "coffee.png", "rocket": "rocket.jpg", "chelsea": "chelsea.png"}

NETWORKS = ("scenes_cnn", "scenes_cnn_shortcut", "scenes_vit", "scenes_vit_shortcut")  # classifiers of `visattn.data.scenes`


def photo_path(name: str) -> Path:
    """Return the file of a photo in `PHOTOS`.

    Raises:
        OptionError: If `PHOTOS` has no photo of that name.
    """
    return Path(__file__).parent / "photos" / PHOTOS[one_of(name, tuple(PHOTOS), "photo")]


def network_path(name: str) -> Path:
    """Return the folder of a network in `NETWORKS`.

    Raises:
        OptionError: If `NETWORKS` has no network of that name.
    """
    return Path(__file__).parent / "networks" / one_of(name, NETWORKS, "network")
