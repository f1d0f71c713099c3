"""Fashion-MNIST and CIFAR, read from disk if installed, else downloaded with torchvision.

The idx files of Fashion-MNIST are read here. CIFAR's files are pickles, which can run arbitrary code. They are passed to torchvision only
if each file has the md5 that torchvision lists for it.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from visattn._support.checks import printable, unreadable
from visattn._support.files import cache_folder
from visattn._support.language import option
from visattn.data.labeled.arrays import ArrayDataset
from visattn.data.labeled.idx import read_idx
from visattn.errors import DataError

PACKAGE = Path("/usr/share/datasets/fashion-mnist")  # folder of Debian's package dataset-fashion-mnist
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_SECONDS = 8  # time limit for a server to answer


def fashion_mnist(split: str, root: Path | None = None) -> ArrayDataset:
    """Load Fashion-MNIST: 60,000 train and 10,000 test images, gray, 28 x 28, in ten classes.

    Args:
        split: `train` or `test`.
        root: Folder to search first. It may hold the four idx files, compressed or not, or torchvision's folder `FashionMNIST/raw`.

    Returns:
        The dataset.

    Raises:
        DataError: If the files are neither found nor can be downloaded, or if they are damaged.
    """
    cache = cache_folder()
    places = [*([root, root / "FashionMNIST" / "raw"] if root else []), PACKAGE, cache / "FashionMNIST" / "raw"]
    names = [f"{'train' if split == 'train' else 't10k'}-{kind}" for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    with _access(root or cache):
        files = _idx_files(places, names)
    if files is None:
        from torchvision.datasets import FashionMNIST

        fix = f"install it with: apt-get install dataset-fashion-mnist; or pass the folder of its idx files as {option('root')}"
        url = FashionMNIST.mirrors[0] + FashionMNIST.resources[0][0]
        _download(FashionMNIST, "FashionMNIST", url, f"fashion-mnist: not found in {_shown(places)}", fix)
        files = _idx_files(places[-1:], names) or []
    pixels, labels = (read_idx(file, item) for file, item in zip(files, [(28, 28), ()], strict=True))
    return ArrayDataset(pixels, labels, FASHION, f"fashion-mnist {split}")


def cifar(data: str, split: str, root: Path | None = None) -> ArrayDataset:
    """Load CIFAR-10 or CIFAR-100: 50,000 train and 10,000 test images, RGB, 32 x 32.

    Args:
        data: `cifar10` or `cifar100`.
        split: `train` or `test`.
        root: Folder to search first. It should hold torchvision's folder `cifar-10-batches-py` or `cifar-100-python`.

    Returns:
        The dataset.

    Raises:
        DataError: If the files are neither found nor can be downloaded, or if they differ from the published ones.
    """
    from torchvision import datasets
    from torchvision.datasets.utils import check_integrity

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[data]
    places = [*([root] if root else []), cache_folder()]
    with _access(root or cache_folder()):
        place = next((place for place in places if (place / kind.base_folder).is_dir()), None)
    if place is None:
        _download(
            kind,
            kind.base_folder,
            kind.url,
            f"{data}: {kind.base_folder} not found in {_shown(places)}",
            f"pass its parent folder as {option('root')}",
        )
        place = places[-1]
    # torchvision verifies md5 before it unpickles, too; safety must not depend on future versions doing so
    for name, md5 in [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]:
        file = place / kind.base_folder / name
        with _access(file):
            got = "" if check_integrity(file, md5) else "another" if file.is_file() else "no file"
        if got:
            raise DataError(f"{printable(str(file))}: must have the md5 {md5}, got {got}. Download it again.")
    published = kind(place, train=split == "train")
    return ArrayDataset(np.ascontiguousarray(published.data), published.targets, published.classes, f"{data} {split}")


@contextlib.contextmanager
def _access(place: Path) -> Iterator[None]:
    """Turn an error of the file system into a message; the place is named if the error names none."""
    try:
        yield
    except OSError as error:
        raise DataError(unreadable(error, place)) from error


def _idx_files(places: list[Path], names: list[str]) -> list[Path] | None:
    """Return the files of the first folder that has all of them, compressed or not."""
    for place in places:
        pairs = [[file for file in (place / f"{name}.gz", place / name) if file.is_file()] for name in names]
        if all(pairs):
            return [pair[0] for pair in pairs]
    return None


def _download(dataset: Callable[..., Any], folder: str, url: str, lack: str, fix: str) -> None:
    """Download and verify a dataset with torchvision, and move it to the cache once it is complete.

    Raises:
        DataError: If the server does not answer, the download stops, or the files differ from the published ones.
    """
    cache = cache_folder()
    if refusal := _refusal(url):
        raise DataError(f"{lack}, and {url.split('/')[2]} {refusal}; {fix}.")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".visattn-") as temporary, _patience():
            dataset(temporary, download=True)
            Path(temporary, folder).rename(cache / folder)
    except (OSError, RuntimeError, HTTPException) as error:
        reason = printable(" ".join(str(error).split()))
        raise DataError(f"{lack}, and the download failed ({reason}); {fix}.") from error


def _refusal(url: str) -> str:
    """Return in words that a server does not answer in time, or refuses; asked in a thread, because name lookup has no timeout."""
    answers = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_SECONDS):
                answers.append("")
        except urllib.error.HTTPError as error:
            error.close()
            answers.append(printable(f"answers {error.code} {error.reason}"))
        except (OSError, HTTPException):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return answers[0] if answers else "does not answer"


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Set a timeout for every answer of a server; torchvision sets none and would wait forever."""
    former = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(former)


def _shown(places: list[Path]) -> str:
    return printable(", ".join(map(str, places)))
