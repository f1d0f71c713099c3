"""Folder with what each image gave to a space, from which a run that was interrupted goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visattn._support.whole_files import refusal
from visattn.embedding.one_image import OneImage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from visattn.core.pipeline.inputs import Prepared

_NAMES = "[0-9]*.safetensors", ".visattn-*"  # the second: what a kill cut off while it was written
_CLOSE = 0.004, 1e-4  # of a value, and of the largest: states of the same model differ by half precision at most


class Kept:
    """Folder with a file for each image.

    A file is used only for the same image, mask, preprocessing and settings. Whatever else it holds, it is written anew.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:  # noqa: ANN401 - plain values
        """Create the folder.

        Args:
            folder: The folder.
            settings: What decides the results besides the image: weights, layers, seed, version.

        Raises:
            OutputError: If it cannot be created.
        """
        self._folder, self._settings = folder, settings
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refused = refusal(error, folder)
            raise refused from error

    def key(self, prepared: Prepared, mask: NDArray[np.bool_] | None) -> str:
        """Return a digest of an image and the other inputs as the model receives them, of a mask, and of the settings."""
        digest = hashlib.sha256(json.dumps(self._settings, sort_keys=True).encode())
        inputs = [prepared.pixels, *(value for _, value in sorted(prepared.inputs.items()) if isinstance(value, Tensor))]
        shapes = [
            prepared.photo.size,
            prepared.geometry,
            *(value.shape for value in inputs),
            None if mask is None else mask.shape,
        ]
        digest.update(repr(shapes).encode())
        arrays = [prepared.photo.tobytes(), *(value.cpu().numpy().tobytes() for value in inputs)]
        for values in (*arrays, b"" if mask is None else mask.tobytes()):
            digest.update(hashlib.sha256(values).digest())
        return digest.hexdigest()

    def read(self, number: int, key: str) -> OneImage | None:
        """Return what an image gave, if a whole file with this key was kept."""
        try:
            return OneImage.load(self._file(number), key)
        except Exception:
            return None

    def write(self, number: int, key: str, found: OneImage) -> None:
        """Keep what an image gave."""
        found.save(self._file(number), key)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:06}.safetensors"


@contextmanager
def continuing(folder: Path, names: Sequence[str]) -> Iterator[list[Path]]:
    """Give places for what is kept; delete it if the `with` block succeeds. If it fails, only what the next run goes on from stays.

    Args:
        folder: Folder of the places. Files of somebody else in it stay.
        names: Names of the places.

    Yields:
        The places, as folders that need not exist.
    """
    places = [folder / name for name in names]
    try:
        yield places
        for file in (file for place in places for pattern in _NAMES for file in place.glob(pattern)):
            file.unlink(missing_ok=True)
    finally:
        for place in (*places, folder):
            with suppress(OSError):  # it is not there, or something is in it
                place.rmdir()


def alike(one: OneImage, other: OneImage) -> bool:
    """Check whether two contributions of an image come from the same model: weights do not tell the number of heads, nor a changed rule."""
    if one.layers.keys() != other.layers.keys():
        return False
    pairs = [(one.layers[name], other.layers[name]) for name in one.layers]
    if one.sinks != other.sinks or not _close(one.code, other.code):
        return False
    return all(_close(getattr(a, side), getattr(b, side)) for a, b in pairs for side in ("queries", "keys", "rows"))


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    one, other = one.float(), other.float()
    relative, of_largest = _CLOSE
    largest = float(one.nan_to_num().abs().amax()) if one.numel() else 0.0
    return bool(torch.allclose(one, other, rtol=relative, atol=of_largest * largest, equal_nan=True))
