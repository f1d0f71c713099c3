"""Labeled pictures in folders, `DIR/train/CLASS/...` and `DIR/test/CLASS/...`, the layout of torchvision's `ImageFolder`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, get_args

import numpy as np
from PIL import Image

from visattn._support.checks import printable
from visattn._support.types import Split
from visattn.data.labeled.arrays import check_learnable
from visattn.errors import DataError
from visattn.images import FORMATS, load_image

_SPLITS = {"train": ("train",), "test": ("test", "val")}  # the first that is there
_NAMED = 5  # classes that a message names


class FolderPictures:
    """Pictures of one split of a folder; each is decoded when it is asked for.

    Attributes:
        classes: Names of the class folders, sorted.
        labels: `(N,)`, indices into `classes`.
        channels: 3.
        size: None; pictures differ.
    """

    channels: int = 3
    size: tuple[int, int] | None = None

    def __init__(self, folder: Path, split: Split) -> None:
        """List the files, in an order that is the same everywhere.

        Files whose ending is of no known format are left out, hidden ones too; links are followed.

        Args:
            folder: Holds `train/CLASS/...` and `test/CLASS/...` (or `val`), pictures lying however deep; what
                `visattn.data.scenes.write` made of `train` and `test` is understood too.
            split: Which; for `test` that is `val` where there is no folder `test`.

        Raises:
            DataError: If the folder is laid out otherwise, train and test differ in classes, a class has no picture, or there is
                nothing to be learned from them.
        """
        name = printable(str(folder))
        try:
            self._place, self.classes = _classes(folder, split)
            found = [(label, path) for label, one in enumerate(self.classes) for path in _pictures(self._place, one)]
        except OSError as error:
            at = printable(str(error.filename or name))
            raise DataError(f"{at}: cannot be read ({(error.strerror or str(error)).lower()}). Check its mode.") from error
        title = printable(str(self._place))
        self.labels = np.array([label for label, _ in found], np.int64)
        counts = np.bincount(self.labels, minlength=len(self.classes))
        if found and not counts.all():
            empty = _listed({one for one, count in zip(self.classes, counts, strict=True) if not count})
            raise DataError(
                f"{title}: every class must have pictures, got none for {empty}. Add some, or remove the class everywhere."
            )
        check_learnable(self.labels, self.classes, title)
        self._files = np.array([os.fsencode(path) for _, path in found])  # one array: a list would be copied by every worker
        self._digest = ""

    def __len__(self) -> int:
        """How many."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Picture, upright and RGB, and label.

        Raises:
            ImageError: If the file cannot be used; the message names it.
        """
        return load_image(self._path(index)), int(self.labels[index])

    def name(self, index: int) -> str:
        """The file."""
        return printable(str(self._path(index)))

    def fingerprint(self) -> str:
        """Digest of classes and of label, name and size of each file; the folder may lie anywhere."""
        if not self._digest:
            digest = hashlib.sha256(json.dumps(self.classes).encode())
            for index, label in enumerate(self.labels):
                digest.update(b"%d %d %s\0" % (label, _size(self._path(index)), self._files[index]))
            self._digest = digest.hexdigest()
        return self._digest

    def _path(self, index: int) -> Path:
        return self._place / os.fsdecode(self._files[index])


def _classes(folder: Path, split: str) -> tuple[Path, tuple[str, ...]]:
    """Where the class folders of a split lie, and their names, which must be those of the other split, if it is there."""
    places = {}
    for key, names in _SPLITS.items():
        there = [folder / name for name in names if (folder / name).is_dir()]
        if there:
            inner = there[0] / "images"  # as scenes are written
            places[key] = inner if (there[0] / "scenes.jsonl").is_file() and inner.is_dir() else there[0]
    if split not in places or "train" not in places:
        _refuse_layout(folder, "train" if "train" not in places else split)
    found = {
        key: {item.name for item in place.iterdir() if item.is_dir() and item.name[0] != "."} for key, place in places.items()
    }
    for key, place in places.items():
        if not found[key]:
            name = printable(str(place))
            raise DataError(
                f"{name}: must hold a folder of pictures for each class, got none. Expected {name}/CLASS/picture.png."
            )
    if "test" in found and found["train"] != found["test"]:
        differ = [
            f"only in {places[here]}: {_listed(found[here] - found[there])}"
            for here, there in (get_args(Split), get_args(Split)[::-1])
            if found[here] - found[there]
        ]
        raise DataError(
            f"{printable(str(folder))}: train and test must have the same classes, got {printable('; '.join(differ))}. "
            "Rename or remove these folders."
        )
    return places[split], tuple(sorted(found[split]))


def _refuse_layout(folder: Path, missing: str) -> NoReturn:
    name = printable(str(folder))
    if (folder / "scenes.jsonl").is_file():
        raise DataError(
            f"{name}: must hold train and test, got scenes of one split. Write two, into {name}/train and {name}/test."
        )
    there = sorted(item.name for item in folder.iterdir() if item.is_dir() and not item.name.startswith("."))
    raise DataError(
        f"{name}: must hold train/CLASS/picture.png and test/CLASS/picture.png (or val/), got no folder {missing} "
        f"but {_listed(set(there)) or 'no folders'}. Move the pictures of {missing} there."
    )


def _pictures(place: Path, one: str) -> Iterator[str]:
    """Files of a class by their endings, however deep, relative to `place`; a folder that links lead to twice is read once."""
    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS}
    seen: set[Path] = set()
    for folder, folders, files in os.walk(place / one, onerror=_raise, followlinks=True):
        if Path(folder).resolve() in seen:
            folders.clear()
            continue
        seen.add(Path(folder).resolve())
        folders[:] = sorted(child for child in folders if not child.startswith("."))
        for file in sorted(files):
            if not file.startswith(".") and Path(file).suffix.lower() in endings:
                yield Path(folder, file).relative_to(place).as_posix()


def _raise(error: OSError) -> NoReturn:
    raise error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it is refused by name when it is asked for
        return -1


def _listed(names: set[str]) -> str:
    """Names in their order, the first ones where they are many."""
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return printable(", ".join(sorted(names)[:_NAMED])) + rest
