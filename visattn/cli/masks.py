"""Masks of objects, in files that are named as the photos."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from visattn._support.checks import printable
from visattn._support.files import is_folder
from visattn.errors import ImageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def masks_of(photos: Sequence[Path], masks: Path) -> list[NDArray[np.bool_]]:
    """Load the mask of each photo: the file itself for one photo, else the file in a folder whose name has the same stem.

    Raises:
        ImageError: If a photo has no mask, or a mask cannot be read.
    """
    import numpy as np

    from visattn.images import load_file

    found = []
    for photo in photos:
        file = masks
        if is_folder(masks):
            named = sorted(masks.glob(f"{glob.escape(photo.stem)}.*"))
            if len(named) != 1:
                raise ImageError(
                    f"{printable(str(masks))}: must hold one mask named {printable(photo.stem)}.png, got {len(named) or 'none'}. "
                    "Add it, or remove the others."
                )
            (file,) = named
        elif len(photos) > 1:
            raise ImageError(
                f"{printable(str(masks))}: is one mask for {len(photos)} photos. Pass a folder with a mask for each."
            )
        found.append(np.asarray(load_file(file).convert("L")) > 0)
    return found
