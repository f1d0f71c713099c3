"""Datasets of captioned images: generated scenes from the cache, and image files."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from visattn._support.checks import printable, unreadable
from visattn._support.language import option
from visattn.core.images import load_file
from visattn.data.image_dataset import size_of
from visattn.data.scenes import VERSION, Pairs, Scenes
from visattn.data.scenes.store import kept, seed_of
from visattn.errors import DataError


class _Kind(NamedTuple):
    """Settings of `Scenes` for one dataset."""

    pairs: Pairs
    margin: float


SCENES = {"scenes": _Kind("known", 0.03), "scenes-new": _Kind("new", 0.03), "scenes-any": _Kind("all", 0.0)}
COUNTS = {"train": 20_000, "test": 1_000}
_NAMED = 5  # most folders that a message names


class CaptionSceneDataset:
    """Scenes with their captions, from the cache; see `CaptionDataset`."""

    channels = 3

    def __init__(self, data: str, split: str, count: int, size: tuple[int, int], seed: int) -> None:
        """Load the scenes from the cache; draw them first if they are not cached.

        Args:
            data: A key of `SCENES`.
            split: A key of `COUNTS`.
            count: Number of scenes.
            size: `(height, width)`; see `Scenes`.
            seed: See `load_captions`.

        Raises:
            OptionError: If `size` is out of range.
            DataError: If the files in the cache are damaged.
            OutputError: If the cache cannot be written.
            ResourceError: If the disk is full, or the worker processes were killed.
        """
        pairs, margin = SCENES[data]
        scenes = Scenes(count, (size[0], size[1]), seed=seed_of(split, seed), distractors=(0, 2), pairs=pairs, margin=margin)
        self.scenes, self.size = scenes, scenes.size
        self._pixels, self._captions = kept(scenes, f"captions-{data}", "captions")
        self._title, self._source = f"{data} {split}", json.dumps([VERSION, data, scenes.size, scenes.seed])

    def __len__(self) -> int:
        """Return the number of scenes."""
        return len(self._captions)

    def __getitem__(self, index: int) -> tuple[Image.Image, tuple[str, ...]]:
        """Return an image and its single caption."""
        return Image.fromarray(self._pixels[index]), self.captions(index)

    def captions(self, index: int) -> tuple[str, ...]:
        """Return the caption without loading the image."""
        return (bytes(self._captions[index]).decode(),)

    def name(self, index: int) -> str:
        """Return the title of the dataset and the index."""
        return f"{self._title} {index}"

    def fingerprint(self) -> str:
        """Return a sha256 of the settings of the scenes and of the captions."""
        return hashlib.sha256(b"\n".join((self._source.encode(), *self._captions.tolist()))).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Replace the memory-mapped pixels by their file name, so that a pickle stays small."""
        return self.__dict__ | {"_pixels": str(self._pixels.filename)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the pixels again."""
        self.__dict__.update(state | {"_pixels": np.load(state["_pixels"], mmap_mode="r")})


class CaptionFileDataset:
    """Image files with captions from a separate file. Images are decoded on access; see `CaptionDataset`."""

    channels = 3

    def __init__(self, names: Sequence[str], captions: Sequence[tuple[str, ...]], folders: Sequence[Path], title: str) -> None:
        """Find the image files.

        Args:
            names: Names of the images.
            captions: Captions of each image, one or more, without line breaks.
            folders: One or more folders to search; an image is taken from the first folder that has it.
            title: Name of the data in messages.

        Raises:
            DataError: If none of the images is found.
        """
        there = [_found(name, folders) for name in names]
        gone = [name for name, (_, length) in zip(names, there, strict=True) if length < 0]
        places = ", ".join(map(str, folders[:_NAMED])) + (", ..." if len(folders) > _NAMED else "")
        closed = _closed(gone[0], folders) if gone else ""
        lack = closed or (printable(f"no {gone[0]} in {places}.") if gone else "")
        if len(gone) == len(names):
            fix = "" if closed else f" Pass the folder that holds {printable(gone[0])} as {option('root')}."
            raise DataError(f"{title}: must find the images, got none of {len(names)}: {lack}{fix}")
        self.missing = f"{len(gone)} of {len(names)} images are missing: {lack}" if gone else ""
        self._folders, self._places = tuple(map(str, folders)), np.array([place for place, _ in there], np.int16)
        self._lengths = np.array([length for _, length in there], np.int64)
        self._names, self._captions = _Texts(names), _Texts(["\n".join(each) for each in captions])

    @cached_property
    def size(self) -> tuple[int, int] | None:
        """Size `(height, width)` of the images, read from a few."""
        return size_of(self)

    def __len__(self) -> int:
        """Return the number of images, missing ones included."""
        return len(self._lengths)

    def __getitem__(self, index: int) -> tuple[Image.Image, tuple[str, ...]]:
        """Return an image, upright and RGB, and its captions.

        Raises:
            ImageError: If the file cannot be read; the message names it.
        """
        return load_file(self._path(index)), self.captions(index)

    def captions(self, index: int) -> tuple[str, ...]:
        """Return the captions without loading the image."""
        return tuple(self._captions[index].split("\n"))

    def name(self, index: int) -> str:
        """Return the path of the file."""
        return printable(str(self._path(index)))

    def fingerprint(self) -> str:
        """Return a sha256 of the name, file size and captions of each image; it does not depend on the folders."""
        digest = hashlib.sha256()
        for index, length in enumerate(self._lengths.tolist()):
            digest.update(json.dumps([self._names[index], length, self.captions(index)]).encode())
        return digest.hexdigest()

    def _path(self, index: int) -> Path:
        return Path(self._folders[self._places[index]], self._names[index])


class _Texts:
    """Read-only list of strings, stored in one buffer: every loader worker would copy a plain list."""

    def __init__(self, texts: Sequence[str]) -> None:
        parts = [text.encode() for text in texts]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self._whole, self._spans = b"".join(parts), np.stack((np.concatenate(([0], ends[:-1])), ends), 1)

    def __getitem__(self, index: int) -> str:
        start, end = self._spans[index]
        return self._whole[start:end].decode()


def _closed(name: str, folders: Sequence[Path]) -> str:
    """Return a message that an image cannot be read, if a folder that may have it does not let us look."""
    for folder in folders:
        try:
            (folder / name).stat()
        except PermissionError as error:
            return unreadable(error, folder / name)
        except (OSError, ValueError):
            continue
    return ""


def _found(name: str, folders: Sequence[Path]) -> tuple[int, int]:
    """Return the index of the folder that has an image, and the length of its file; `(0, -1)` if no folder has it."""
    for number, folder in enumerate(folders):
        try:
            facts = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118 - a Path takes several times as long, for each image
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(facts.st_mode):
            return number, facts.st_size
    return 0, -1
