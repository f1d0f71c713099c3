"""Photos that come with the package; `LICENSES.md` in their folder lists their licenses."""

from __future__ import annotations

from pathlib import Path

from visattn._support.checks import one_of

__all__ = ["PHOTOS", "photo_path"]

PHOTOS = {"astronaut": "astronaut.png", "coffee": "coffee.png", "rocket": "rocket.jpg", "chelsea": "chelsea.png"}


def photo_path(name: str) -> Path:
    """Return the file of a photo in `PHOTOS`.

    Raises:
        OptionError: If `PHOTOS` has no photo of that name.
    """
    return Path(__file__).parent / "photos" / PHOTOS[one_of(name, tuple(PHOTOS), "photo")]
