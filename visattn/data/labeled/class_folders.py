"""Labeled images in folders, `DIR/train/CLASS/...` and `DIR/test/CLASS/...`: the layout of torchvision's `ImageFolder`.

A folder `DIR/CLASS/...` is split into train and test by a seed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NoReturn, get_args

import numpy as np
from PIL import Image

from visattn._support.checks import printable, unreadable
from visattn._support.language import option, worded
from visattn._support.types import Split
from visattn.core.images import FORMATS, load_file
from visattn.data.image_dataset import size_of
from visattn.data.labeled.arrays import check_learnable
from visattn.errors import DataError

_SPLITS = {"train": ("train",), "test": ("test", "val")}  # the first folder that exists is used
_NAMED = 5  # most classes that a message names


class FolderDataset:
    """Labeled images of one split of a folder; they are decoded on access.

    Attributes:
        classes: Names of the class folders, sorted.
        labels: `(N,)`, indices into `classes`.
        channels: 3.
        size: Size of the images, read from a few; see `ImageDataset`.
    """

    channels: int = 3

    def __init__(self, folder: Path, split: Split, *, held_out: float = 0.0, seed: int = 0) -> None:
        """List the files, in the same order on every machine.

        Hidden files and files with an unknown ending are skipped; links are followed.

        Args:
            folder: Folder that holds `train/CLASS/...` and `test/CLASS/...` (or `val`), with images at any depth. `train` and `test`
                may also be folders written by `visattn.data.scenes.write`.
            split: `train` or `test`; `val` is used for `test` if there is no folder `test`.
            held_out: For a folder that holds `CLASS/...`: share of each class, at least one image, that is `test`. 0: the folder holds
                both splits.
            seed: Seed that chooses these images.

        Raises:
            DataError: If the folder has another layout, train and test differ in classes, a class has no image (with `held_out`, only
                one), or the labels cannot be trained on.
        """
        try:
            self._place, self.classes = _flat_classes(folder) if held_out else _classes(folder, split)
            by_class = [list(_pictures(self._place, one)) for one in self.classes]
            if held_out:
                by_class = _part(by_class, self.classes, split, held_out, seed)
            found = [(label, path) for label, paths in enumerate(by_class) for path in paths]
        except OSError as error:
            raise DataError(unreadable(error, folder)) from error
        title = printable(str(self._place))
        self.labels = np.array([label for label, _ in found], np.int64)
        counts = np.bincount(self.labels, minlength=len(self.classes))
        if not counts.all():
            empty = _listed({one for one, count in zip(self.classes, counts, strict=True) if not count})
            rest = (
                f", or remove {'its folder' if held_out else 'the class from train and test'}"
                if np.count_nonzero(counts) > 1
                else ""
            )
            raise DataError(
                f"{title}: every class must have images ({', '.join(FORMATS)}), got none for {empty}. Add some{rest}."
            )
        check_learnable(self.labels, self.classes, title)
        self._files = np.array([os.fsencode(path) for _, path in found])  # one array: every loader worker would copy a list
        self._digest = ""

    @cached_property
    def size(self) -> tuple[int, int] | None:
        """Size `(height, width)` of the images, read from a few."""
        return size_of(self)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Return an image, upright and RGB, and its label.

        Raises:
            ImageError: If the file cannot be read; the message names it.
        """
        return load_file(self._path(index)), int(self.labels[index])

    def name(self, index: int) -> str:
        """Return the path of the file."""
        return printable(str(self._path(index)))

    def fingerprint(self) -> str:
        """Return a sha256 of the classes and of the label, name and size of each file; it does not depend on the folder."""
        if not self._digest:
            digest = hashlib.sha256(json.dumps(self.classes).encode())
            for index, label in enumerate(self.labels):
                digest.update(b"%d %d %s\0" % (label, _size(self._path(index)), self._files[index]))
            self._digest = digest.hexdigest()
        return self._digest

    def _path(self, index: int) -> Path:
        return self._place / os.fsdecode(self._files[index])


def _classes(folder: Path, split: str) -> tuple[Path, tuple[str, ...]]:
    """Return the folder that holds the class folders of a split, and their names.

    Raises:
        DataError: If a folder is missing, or the other split exists and has other classes.
    """
    places = {}
    for key, names in _SPLITS.items():
        there = [folder / name for name in names if (folder / name).is_dir()]
        if there:
            inner = there[0] / "images"  # layout of written scenes
            places[key] = inner if (there[0] / "scenes.jsonl").is_file() and inner.is_dir() else there[0]
    if split not in places or "train" not in places:
        _refuse_layout(folder, "train" if "train" not in places else split)
    found = {key: _folders_in(place) for key, place in places.items()}
    for key, place in places.items():
        if not found[key]:
            name = printable(str(place))
            fix = f"Expected {name}/CLASS/image.png{_flat_hint(folder)}."
            raise DataError(f"{name}: must hold a folder of images for each class, got none. {fix}")
    if "test" in found and found["train"] != found["test"]:
        differ = [
            f"only in {places[here]}: {_listed(found[here] - found[there])}"
            for here, there in (get_args(Split), get_args(Split)[::-1])
            if found[here] - found[there]
        ]
        raise DataError(
            f"{printable(str(folder))}: train and test must have the same classes, got {printable('; '.join(differ))}. "
            "Add, rename or remove these folders."
        )
    return places[split], tuple(sorted(found[split]))


def _flat_classes(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Return a folder and the names of its class folders.

    Raises:
        DataError: If it has no folders, or holds both splits already.
    """
    found = _folders_in(folder)
    name = printable(str(folder))
    if _has_splits(found):
        raise DataError(f"{name}: holds {_listed(found)} already, so there is nothing to split. Leave {_share()} out.")
    if not found:
        raise DataError(f"{name}: must hold a folder of images for each class, got none. Expected {name}/CLASS/image.png.")
    return folder, tuple(sorted(found))


def _part(by_class: list[list[str]], classes: tuple[str, ...], split: Split, held_out: float, seed: int) -> list[list[str]]:
    """Return the images of one split: a seeded choice in each class, so that train and test never share one.

    Raises:
        DataError: If a class has only one image.
    """
    chosen, random = [], np.random.RandomState(seed)  # numpy guarantees that its stream never changes
    for name, paths in zip(classes, by_class, strict=True):
        if len(paths) == 1:
            raise DataError(f"class {printable(name)}: must have two images or more to be split, got one. Add some.")
        order = random.permutation(len(paths))
        count = min(max(1, round(held_out * len(paths))), len(paths) - 1) if paths else 0
        picked = order[:count] if split == "test" else order[count:]
        chosen.append([paths[index] for index in sorted(picked)])
    return chosen


def _folders_in(folder: Path) -> set[str]:
    return {item.name for item in folder.iterdir() if item.is_dir() and not item.name.startswith(".")}


def _has_splits(folders: set[str]) -> bool:
    return "train" in folders and bool(folders & {"test", "val"})


def _share(value: float | None = None) -> str:
    """Return the option that splits a flat folder; a `Config` names it otherwise than `load_labeled`."""
    split = option("split", value)
    return worded(f"{option('held_out', value)} ({split} in a Config)", split)


def _flat_hint(folder: Path) -> str:
    """Return how to split a folder that may hold the classes themselves."""
    there = _folders_in(folder)
    return f", or pass {_share(0.2)} if {_listed(there)} are the classes" if len(there) > 1 and not _has_splits(there) else ""


def _refuse_layout(folder: Path, missing: str) -> NoReturn:
    name = printable(str(folder))
    if (folder / "scenes.jsonl").is_file():
        raise DataError(
            f"{name}: must hold train and test, got scenes of one split. Write both splits, into {name}/train and {name}/test."
        )
    there = _folders_in(folder)
    raise DataError(
        f"{name}: must hold train/CLASS/image.png and test/CLASS/image.png (or val/), got no folder {missing} "
        f"but {_listed(there) or 'no folders'}. Move the images of {missing} there{_flat_hint(folder)}."
    )


def _pictures(place: Path, one: str) -> Iterator[str]:
    """Yield the image files of a class at any depth, relative to `place`; a folder reached twice through links is read once."""
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
    except OSError:  # reading the image raises an error that names it
        return -1


def _listed(names: set[str]) -> str:
    """Join names in sorted order; of many, only the first are listed."""
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return printable(", ".join(sorted(names)[:_NAMED])) + rest
