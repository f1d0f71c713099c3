"""Photos in a folder, and masks beside them."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from visattn._support.checks import printable
from visattn._support.files import exists, is_folder
from visattn.cli.commands import complain
from visattn.errors import ImageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def photos_in(folder: Path, output: Path | None = None) -> tuple[list[Path], int]:
    """Return the sorted image files in a folder and its subfolders, and the number of unreadable folders.

    Images are recognized by their file extension. Hidden files and folders and the output folder are skipped.

    Raises:
        ImageError: If the folder does not exist or contains no image files.
    """
    from PIL import Image

    from visattn.images import FORMATS

    name = printable(str(folder))
    if not is_folder(folder):
        cause = "a file, not a folder; pass the folder that contains it" if exists(folder) else "no such folder; check the path"
        raise ImageError(f"{name}: {cause}")
    refused: list[OSError] = []
    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS}
    seen, found = {output.resolve()} if output else set(), []
    for place, folders, files in os.walk(folder, onerror=refused.append, followlinks=True):
        if Path(place).resolve() in seen:
            folders.clear()
            continue
        seen.add(Path(place).resolve())
        folders[:] = sorted(child for child in folders if not child.startswith("."))
        found += [Path(place, file) for file in files if Path(file).suffix.lower() in endings and not file.startswith(".")]
    for error in refused:
        complain(
            f"{printable(str(error.filename))}: cannot be read ({(error.strerror or str(error)).lower()}); check its permissions"
        )
    if not found:
        raise ImageError(f"{name}: no photos ({', '.join(FORMATS)}) in this folder or its subfolders; pass another folder")
    return sorted(found), len(refused)


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
