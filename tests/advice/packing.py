"""Photos and archives of these tests, and the rights of their owner."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visattn.batch import items_of

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
RED, BLUE, LIME = (255, 0, 0), (0, 0, 255), (0, 255, 0)


def png(color: tuple[int, int, int] = RED) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(stream, "PNG")
    return stream.getvalue()


def packed(file: Path, members: dict[str, bytes]) -> Path:
    """Make an archive anew, tar or zip by its ending."""
    if file.suffix == ".zip":
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return file
    with tarfile.open(file, "w") as tar:
        for name, content in members.items():
            facts = tarfile.TarInfo(name)
            facts.size = len(content)
            tar.addfile(facts, io.BytesIO(content))
    return file


def shown(*inputs: Path | str) -> list[Any]:
    """Return the color of each image of a run."""
    return [item.photo().getpixel((0, 0)) for item in items_of(inputs)]


@contextmanager
def owner() -> Iterator[None]:
    """Act as the owner of the public folder, who is root where `ordinary_user` gives up its rights."""
    user = os.geteuid()
    os.seteuid(os.getuid())
    yield
    os.seteuid(user)
