"""A film of one photo, over which the query walks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from visattn._support.checks import printable
from visattn._support.language import worded
from visattn.batch.films.frames import Frame
from visattn.core.geometry import Box
from visattn.core.images.sources import load_image
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.errors import OptionError

_STILL = ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".avif"
_WITH_QUERY = "attention", "similarity"
_RATE = Fraction(12)  # steps a second
_REACH = 0.42  # of the sides, from the middle


def check_film(source: str | os.PathLike[str]) -> None:
    """Check that a source is no photo, as far as its name tells.

    Raises:
        OptionError: If it is one.
    """
    name = os.fspath(source)
    if name.startswith(("photo:", "scene:")) or name.lower().endswith(_STILL):
        walk = worded("walk=48 and method='attention'", "--walk 48 --method attention")
        raise OptionError(f"{printable(name)} is a photo, not a film. For a film in which the query walks over it, pass {walk}.")


def start_of(steps: int | None, method: object, query: object) -> dict[str, str]:
    """Return the query at which a walk starts, as a parameter of the method; nothing for a film.

    Raises:
        OptionError: If the method has no query, or a query is given.
    """
    if steps is None:
        return {}
    if method not in _WITH_QUERY or query is not None:
        raise OptionError(f"a walk chooses the query, so it needs method {' or '.join(_WITH_QUERY)}, and no query.")
    return {"query": "patch:0,0"}


class Walk:
    """Photo as a film, in which each frame has another query. It is read as a `Film` is.

    Attributes:
        path: What names the photo.
        rate: Steps a second.
        lost: 0, as nothing can be damaged.
        hdr: False, as photos are converted to sRGB.
    """

    def __init__(self, source: str | os.PathLike[str], steps: int, how: Preprocessing, rate: Fraction | None = None) -> None:
        """Load the photo.

        Args:
            source: See `load_image`.
            steps: Number of frames.
            how: Preprocessing, of which the reading is used.
            rate: Steps a second; None: 12.

        Raises:
            ImageError: If it cannot be read.
        """
        self.path, self.rate, self.lost, self.hdr, self._steps = Path(source), rate or _RATE, 0, False, steps
        self.photo = load_image(source, **how.reading)

    def frames(self) -> Iterator[Frame]:
        """Yield the photo once for each step."""
        for step in range(self._steps):
            yield Frame(step / self.rate, self.photo)

    def queries(self, seen: Box) -> Iterator[str]:
        """Yield the query of each step: pixels on a lying eight, which ends where it begins, in the part that the model sees."""
        for step in range(self._steps):
            angle = 2 * math.pi * step / self._steps
            x = seen.left + seen.width * (0.5 + _REACH * math.sin(angle))
            y = seen.top + seen.height * (0.5 + _REACH * math.sin(2 * angle))
            yield f"pixel:{int(x)},{int(y)}"
