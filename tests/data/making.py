"""Images and files that tests of data write."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from visattn.errors import DataError

Pixels = NDArray[np.uint8]


FASHION = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def noise(*shape: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def one_line(error: pytest.ExceptionInfo[DataError]) -> str:
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    return str(error.value)


def save(path: Path, size: tuple[int, int] = (6, 4), color: tuple[int, int, int] = (10, 20, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size[::-1], color).save(path)
    return path


def idx(array: NDArray[Any]) -> bytes:
    return (
        b"\0\0\x08"
        + bytes([array.ndim])
        + b"".join(struct.pack(">I", side) for side in array.shape)
        + array.astype(np.uint8).tobytes()
    )


def fashion(folder: Path, split: str, pixels: Pixels, labels: Any, *, packed: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(FASHION[split], (pixels, np.asarray(labels)), strict=True):
        content = idx(array)
        (folder / f"{name}{'.gz' if packed else ''}").write_bytes(gzip.compress(content) if packed else content)
