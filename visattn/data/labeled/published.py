"""Fashion-MNIST and CIFAR from where they are installed, else from the network, if there is one, by torchvision's downloader.

Fashion-MNIST's files are read here. CIFAR's are pickles, which can run any code: they are given to torchvision only when each has the md5
that torchvision knows for it.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from visattn._support.checks import printable
from visattn._support.files import cache_folder
from visattn.data.labeled.arrays import ArrayPictures
from visattn.data.labeled.idx import read_idx
from visattn.errors import DataError

PACKAGE = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist lies
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_SECONDS = 8  # for a server to answer


def fashion_mnist(split: str, root: Path | None = None) -> ArrayPictures:
    """Fashion-MNIST: 60,000 and 10,000 gray pictures of 28 x 28 in ten classes.

    Args:
        split: `train` or `test`.
        root: Where to look first: for the four idx files, packed or not, or for `FashionMNIST/raw` as torchvision lays it out.

    Returns:
        The pictures.

    Raises:
        DataError: If the files are nowhere and cannot be downloaded, or are damaged.
    """
    cache = cache_folder()
    places = [*([root, root / "FashionMNIST" / "raw"] if root else []), PACKAGE, cache / "FashionMNIST" / "raw"]
    names = [f"{'train' if split == 'train' else 't10k'}-{kind}" for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    files = _idx_files(places, names)
    if files is None:
        from torchvision.datasets import FashionMNIST

        fix = "install it with: apt-get install dataset-fashion-mnist; or pass root (--root) with the folder of its idx files"
        url = FashionMNIST.mirrors[0] + FashionMNIST.resources[0][0]
        _download(FashionMNIST, "FashionMNIST", url, f"fashion-mnist: not found in {_shown(places)}", fix)
        files = _idx_files(places[-1:], names) or []
    pixels, labels = (read_idx(file, item) for file, item in zip(files, [(28, 28), ()], strict=True))
    return ArrayPictures(pixels, labels, FASHION, f"fashion-mnist {split}")


def cifar(data: str, split: str, root: Path | None = None) -> ArrayPictures:
    """CIFAR-10 or CIFAR-100: 50,000 and 10,000 RGB pictures of 32 x 32.

    Args:
        data: `cifar10` or `cifar100`.
        split: `train` or `test`.
        root: Where to look first, for `cifar-10-batches-py` or `cifar-100-python` as torchvision lays them out.

    Returns:
        The pictures.

    Raises:
        DataError: If the files are nowhere and cannot be downloaded, or are not the published ones.
    """
    from torchvision import datasets
    from torchvision.datasets.utils import check_integrity

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[data]
    places = [*([root] if root else []), cache_folder()]
    place = next((place for place in places if (place / kind.base_folder).is_dir()), None)
    if place is None:
        _download(
            kind,
            kind.base_folder,
            kind.url,
            f"{data}: {kind.base_folder} not found in {_shown(places)}",
            "pass root (--root) with the folder around it",
        )
        place = places[-1]
    # torchvision compares them too before it unpickles; whether a newer one does must not decide if foreign code runs
    for name, md5 in [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]:
        file = place / kind.base_folder / name
        if not check_integrity(file, md5):
            raise DataError(
                f"{printable(str(file))}: must have the md5 {md5}, got {'another' if file.is_file() else 'no file'}. Fetch it again."
            )
    published = kind(place, train=split == "train")
    return ArrayPictures(np.ascontiguousarray(published.data), published.targets, published.classes, f"{data} {split}")


def _idx_files(places: list[Path], names: list[str]) -> list[Path] | None:
    """The files of the first place that has all, packed or not."""
    for place in places:
        pairs = [[file for file in (place / f"{name}.gz", place / name) if file.is_file()] for name in names]
        if all(pairs):
            return [pair[0] for pair in pairs]
    return None


def _download(dataset: Callable[..., Any], folder: str, url: str, lack: str, fix: str) -> None:
    """Have torchvision download and check a data set, which then lies in the cache as a whole.

    Raises:
        DataError: If the server does not answer or stops to, or the files are not the published ones.
    """
    cache = cache_folder()
    if not _answers(url):
        raise DataError(f"{lack}, and {url.split('/')[2]} does not answer; {fix}.")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".visattn-") as temporary, _patience():
            dataset(temporary, download=True)
            Path(temporary, folder).rename(cache / folder)
    except (OSError, RuntimeError, HTTPException) as error:
        reason = printable(" ".join(str(error).split()))
        raise DataError(f"{lack}, and the download failed ({reason}); {fix}.") from error


def _answers(url: str) -> bool:
    """Whether a server answers in time; in a thread, since looking up its name knows no limit."""
    answers = []

    def ask() -> None:
        with (
            contextlib.suppress(OSError, HTTPException),
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_SECONDS),
        ):
            answers.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return bool(answers)


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """A limit for every answer of a server: torchvision sets none, and would wait for ever."""
    former = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(former)


def _shown(places: list[Path]) -> str:
    return printable(", ".join(map(str, places)))
