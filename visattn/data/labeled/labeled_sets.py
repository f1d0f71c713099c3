"""Load labeled images by name: a folder, a published dataset, or generated scenes with known ground truth."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn, Protocol, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visattn._support.checks import between, one_of, printable, suggest, unreadable
from visattn._support.files import exists, is_folder
from visattn._support.own_code import is_function
from visattn._support.types import Split
from visattn.data.image_dataset import ImageDataset
from visattn.data.labeled.arrays import ArrayDataset
from visattn.data.labeled.class_folders import FolderDataset
from visattn.data.labeled.cluttered import Cluttered
from visattn.data.labeled.downloaded import cifar, fashion_mnist
from visattn.data.labeled.own import OwnDataset
from visattn.data.labeled.subsets import drawn_from
from visattn.data.scenes.scene_names import DRAWN
from visattn.data.scenes.store import drawn, seed_of
from visattn.errors import DataError, OptionError

__all__ = ["KNOWN", "ArrayDataset", "FolderDataset", "LabeledDataset", "load_labeled"]

CLUTTERED, TURNED = "fashion-mnist-cluttered", "fashion-mnist-turned"
ANGLE = 60.0  # degrees by which items of `TURNED` are rotated, at most
PUBLISHED = ("fashion-mnist", CLUTTERED, TURNED, "cifar10", "cifar100")
KNOWN = (*PUBLISHED, *DRAWN)


class LabeledDataset(ImageDataset, Protocol):
    """Labeled images, for training and testing."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into them."""
        ...

    @property
    def labels(self) -> NDArray[np.int64]:
        """Labels of all images."""
        ...

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Return an image and its label.

        Raises:
            ImageError: If the image cannot be read; the message names the file.
        """
        ...


def load_labeled(
    data: str,
    split: Split,
    *,
    root: Path | None = None,
    count: int | None = None,
    size: tuple[int, int] = (64, 64),
    seed: int = 0,
    held_out: float = 0.0,
) -> LabeledDataset:
    """Load a dataset of labeled images by name.

    Args:
        data: A name in `KNOWN`, a folder that holds `train/CLASS/...` and `test/CLASS/...` (or `val`), or `file.py:factory`, see
            `visattn.data.labeled.own.OwnDataset`. Write `./NAME` for a folder with a name in `KNOWN`. In `scenes-shortcut` a watermark
            reveals the label; in `scenes-conflict` the watermark is random; `scenes-ground` has no object. In `scenes-by-CAUSE` another
            known thing decides the label, see `visattn.data.scenes.causes`. In `fashion-mnist-cluttered` the item lies anywhere, among
            pieces of others; in `fashion-mnist-turned` it is also rotated by up to 60 degrees.
        split: `train` or `test`.
        root: Folder to search first for files of Fashion-MNIST or CIFAR.
        count: Number of images, two or more, drawn at random without regard to labels; all by default. A smaller count gives the first
            images of a larger one.
        size: `(height, width)` of scenes; other images keep their size.
        seed: Seed of the draw by `count`, of the scenes and of `held_out`; 0 to 2**31 - 2.
        held_out: For a folder that holds `CLASS/...`: share of each class that is the test split, chosen by the seed. 0: the folder
            holds both splits.

    Returns:
        The dataset.

    Raises:
        OptionError: If an option is unknown or out of range.
        DataError: If the data does not exist or cannot be trained on; the message says what to do.
    """
    one_of(split, get_args(Split), "split")
    between(seed, 0, 2**31 - 2, "seed")
    between(held_out, 0, 0.9, "held_out")
    if held_out and (data in KNOWN or is_function(data)):
        raise OptionError(f"{printable(data)} has a test split of its own. Leave held_out out.")
    if count is not None and count < 2:
        raise DataError(f"{printable(data)} {split}: count must be 2 or more, got {count}. Raise it.")
    if data in DRAWN:
        return drawn(data, split, count, size, seed)
    whole = _whole(data, split, root, held_out, seed)
    return whole if count is None else drawn_from(whole, count, seed, f"{printable(data)} {split}")


def _whole(data: str, split: Split, root: Path | None, held_out: float, seed: int) -> LabeledDataset:
    if data == "fashion-mnist":
        return fashion_mnist(split, root)
    if data in (CLUTTERED, TURNED):
        turn = ANGLE if data == TURNED else 0.0
        return Cluttered(fashion_mnist(split, root), seed_of(split, 0), f"{data} {split}", turn)
    if data in KNOWN:
        return cifar(data, split, root)
    if is_function(data):
        return OwnDataset(data, split)
    folder = Path(data)
    if not is_folder(folder):
        _refuse(folder, data)
    return FolderDataset(folder, split, held_out=held_out, seed=seed)


def _refuse(folder: Path, data: str) -> NoReturn:
    name = printable(data)
    if exists(folder):
        fix = f"Pass {name}:factory." if folder.suffix == ".py" else "If it is an archive, unpack it and pass the folder."
        raise DataError(f"{name}: must be a folder, got a file. {fix}")
    try:
        folder.stat()
    except PermissionError as error:
        raise DataError(unreadable(error, folder)) from error
    except (OSError, ValueError):
        pass
    near = suggest(data, KNOWN, 1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise DataError(
        f"{name}: no such folder{hint} Pass a folder that holds train/CLASS/image.png, file.py:factory, or one of {', '.join(KNOWN)}."
    )
