"""The photos that come with the package; their licenses are in `LICENSES.md` beside them."""

from __future__ import annotations

from pathlib import Path

from visattn._support.checks import one_of

PHOTOS = {"astronaut": "astronaut.png", "coffee": "coffee.png", "rocket": "rocket.jpg", "chelsea": "chelsea.png"}


def photo_path(name: str) -> Path:
    """The file of a photo of `PHOTOS`.

    Raises:
        OptionError: If there is none of that name.
    """
    return Path(__file__).parent / "photos" / PHOTOS[one_of(name, tuple(PHOTOS), "photo")]
