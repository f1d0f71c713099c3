"""Fashion-MNIST and CIFAR: files as published, damaged files, and the network."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import shutil
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from torchvision import datasets

from tests.data.making import FASHION, fashion, idx, noise, one_line
from visattn.data import ArrayDataset
from visattn.data.labeled import downloaded as published
from visattn.data.labeled.labeled_sets import load_labeled
from visattn.errors import DataError


@pytest.mark.parametrize("place", ["root", "root/FashionMNIST/raw", "package", "cache/FashionMNIST/raw"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_fashion_mnist_is_found_in_every_known_location(
    tmp_path: Path, place: str, packed: bool, split: Literal["train", "test"]
) -> None:
    pixels, labels = noise(6, 28, 28), [3, 9, 0, 1, 1, 4]
    fashion(tmp_path / place, split, pixels, labels, packed=packed)
    pictures = load_labeled("fashion-mnist", split, root=tmp_path / "root")
    assert (len(pictures), pictures.size, pictures.channels, len(pictures.classes)) == (6, (28, 28), 1, 10)
    assert all((np.asarray(pictures[i][0]) == pixels[i]).all() and pictures[i][1] == labels[i] for i in range(6))
    assert pictures.name(4) == f"fashion-mnist {split} 4"


def test_root_takes_precedence_over_the_package(tmp_path: Path) -> None:
    for place, shade in (("root", 1), ("package", 2), ("cache/FashionMNIST/raw", 3)):
        fashion(tmp_path / place, "train", np.full((2, 28, 28), shade, np.uint8), [0, 1])
    assert np.asarray(load_labeled("fashion-mnist", "train", root=tmp_path / "root")[0][0]).max() == 1
    assert np.asarray(load_labeled("fashion-mnist", "train")[0][0]).max() == 2
    shutil.rmtree(tmp_path / "package")
    assert np.asarray(load_labeled("fashion-mnist", "train")[0][0]).max() == 3


def test_the_installed_fashion_mnist_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path("/usr/share/datasets/fashion-mnist")
    if not package.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    monkeypatch.setattr(published, "PACKAGE", package)
    pictures = load_labeled("fashion-mnist", "test")
    assert isinstance(pictures, ArrayDataset)
    assert pictures.classes == tuple(datasets.FashionMNIST.classes)
    assert np.bincount(pictures.labels).tolist() == [1000] * 10
    assert 0.286 < pictures.pixels.mean() / 255 < 0.288


GOOD = idx(noise(3, 28, 28))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"must be an idx file of bytes with 3 axes, got a file that starts with nothing\. Download it again\."),
        (b"<html>", "got a file that starts with 3c 68 74 6d"),
        (GOOD[:10], r"must have a header of 16 bytes, got 10\. It is damaged; download it again\."),
        (b"\0\0\x0d" + GOOD[3:], "got a file that starts with 00 00 0d 03"),
        (idx(noise(3, 28)), "got a file that starts with 00 00 08 02"),
        (idx(noise(3, 28, 27)), r"must have the shape \(N, 28, 28\), got \(3, 28, 27\)\."),
        (GOOD[:4] + b"\xff" * 4 + GOOD[8:], r"must hold at most 2147483648 bytes of data, its header states 33\d+\."),
        (GOOD[:-1], r"must hold 2352 bytes of data, got 2351\. It is damaged"),
        (GOOD + b"\0", r"must hold 2352 bytes of data, got more\."),
    ],
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_damaged_idx_files_are_refused(tmp_path: Path, content: bytes, message: str, packed: bool) -> None:
    fashion(tmp_path, "train", noise(3, 28, 28), [0, 1, 2], packed=packed)
    path = tmp_path / f"{FASHION['train'][0]}{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=rf"{path.name}: {'' if message.startswith('must') else '.*'}{message}") as error:
        load_labeled("fashion-mnist", "train", root=tmp_path)
    one_line(error)


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_damaged_archive_is_refused(tmp_path: Path, how: str) -> None:
    fashion(tmp_path, "train", noise(3, 28, 28), [0, 1, 2])
    path = tmp_path / f"{FASHION['train'][0]}.gz"
    whole = path.read_bytes()
    flipped = whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:]  # flip a bit of the checksum: the data look intact
    path.write_bytes({"cut": whole[: len(whole) // 2], "flipped": flipped}[how])
    with pytest.raises(DataError, match=rf"{path.name}: cannot be read \(.*\)\. Download it again\.") as error:
        load_labeled("fashion-mnist", "train", root=tmp_path)
    one_line(error)


def test_labels_that_do_not_match_the_images_are_refused(tmp_path: Path) -> None:
    fashion(tmp_path, "train", noise(3, 28, 28), [0, 1])
    with pytest.raises(DataError, match="fashion-mnist train: must have one label per image, got 3 images and 2 labels"):
        load_labeled("fashion-mnist", "train", root=tmp_path)
    fashion(tmp_path, "train", noise(2, 28, 28), [0, 10])
    with pytest.raises(DataError, match="labels must lie from 0 to 9, got 10 for image 1"):
        load_labeled("fashion-mnist", "train", root=tmp_path)


class Handler(SimpleHTTPRequestHandler):
    """Handler that serves files; for names with `stall` it sends the first bytes, then nothing until the test is over."""

    over = threading.Event()

    def log_message(self, format: str, *args: object) -> None:
        """Suppress log messages."""

    def do_GET(self) -> None:
        if "stall" not in self.path:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"begin")
        self.over.wait()
        return None


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run a mirror of Fashion-MNIST; yield the folder of its files."""
    folder = tmp_path / "server"
    for split in FASHION:
        fashion(folder, split, noise(4, 28, 28), [0, 1, 2, 3])
    Handler.over.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        files = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in sorted(folder.iterdir())]
        monkeypatch.setattr(datasets.FashionMNIST, "mirrors", [f"http://127.0.0.1:{running.server_address[1]}/"])
        monkeypatch.setattr(datasets.FashionMNIST, "resources", files)
        yield folder
        Handler.over.set()
        running.shutdown()
        thread.join()


def test_downloads_are_cached_in_torchvision_layout(server: Path, cache: Path) -> None:
    pictures = load_labeled("fashion-mnist", "train")
    assert (np.asarray(pictures[2][0]) == noise(4, 28, 28)[2]).all()
    assert [item.name for item in cache.iterdir()] == ["FashionMNIST"]
    shutil.rmtree(server)
    assert load_labeled("fashion-mnist", "train").fingerprint() == pictures.fingerprint()
    assert len(datasets.FashionMNIST(cache, train=False)) == len(load_labeled("fashion-mnist", "test")) == 4


def test_download_with_a_wrong_checksum_is_refused_and_removed(server: Path, cache: Path) -> None:
    for path in server.iterdir():
        path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(
        DataError, match=r"fashion-mnist: not found in .*, and the download failed \(.*\); install it with"
    ) as error:
        load_labeled("fashion-mnist", "train")
    one_line(error)
    assert not list(cache.iterdir())


def test_stalled_download_times_out(server: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "_SECONDS", 3.0)
    (server / "stall").write_bytes(b"")
    monkeypatch.setattr(datasets.FashionMNIST, "resources", [("stall", "0" * 32)])
    with pytest.raises(
        DataError,
        match=r"the download failed \(.*\); install it with: apt-get install dataset-fashion-mnist; or pass the folder of its idx files",
    ):
        load_labeled("fashion-mnist", "train")
    assert not list(cache.iterdir())
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize("who", ["connection refused", "no answer", "unknown host"])
def test_unreachable_server_gives_an_error_message(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    monkeypatch.setattr(published, "_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if who == "connection refused":
            silent.close()
        host = "server.invalid" if who == "unknown host" else "127.0.0.1"
        monkeypatch.setattr(datasets.FashionMNIST, "mirrors", [f"http://{host}:{port}/"])
        with pytest.raises(
            DataError, match=rf"fashion-mnist: not found in .*, and {host}:{port} does not answer; install it with"
        ) as error:
            load_labeled("fashion-mnist", "train")
    one_line(error)


def test_hanging_dns_lookup_gives_an_error_message(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(published, "_SECONDS", 0.1)

    def hang(*args: Any, **options: Any) -> list[Any]:
        over.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", ["http://server.invalid/"])
    try:
        with pytest.raises(DataError, match=r"server\.invalid does not answer"):
            load_labeled("fashion-mnist", "train")
    finally:
        over.set()


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write small files in the format of CIFAR-10 and CIFAR-100, and make torchvision accept their md5."""
    for kind, classes, field in ((datasets.CIFAR10, 10, "labels"), (datasets.CIFAR100, 100, "fine_labels")):
        place = tmp_path / "root" / kind.base_folder
        place.mkdir(parents=True)

        def pickled(name: str, content: Any, place: Path = place) -> list[str]:
            (place / name).write_bytes(pickle.dumps(content))
            return [name, hashlib.md5((place / name).read_bytes()).hexdigest()]

        parts = [pickled(f"part{i}", {"data": noise(4, 3072, seed=i), field: [0, 1, 2, classes - 1]}) for i in range(3)]
        meta = pickled("meta", {kind.meta["key"]: [f"class {i}" for i in range(classes)]})
        monkeypatch.setattr(kind, "train_list", parts[:2])
        monkeypatch.setattr(kind, "test_list", parts[2:])
        monkeypatch.setattr(kind, "meta", kind.meta | dict(zip(("filename", "md5"), meta, strict=True)))
        monkeypatch.setattr(kind, "url", "http://127.0.0.1:1/cifar.tar.gz")
    return tmp_path / "root"


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_color_planes_are_combined(cifar: Path, name: str, classes: int) -> None:
    pictures = load_labeled(name, "train", root=cifar)
    assert (len(pictures), pictures.size, pictures.channels, len(pictures.classes)) == (8, (32, 32), 3, classes)
    rows = np.concatenate([noise(4, 3072, seed=i) for i in range(2)])
    for i in (0, 5):
        picture = pictures[i][0]
        for y, x in ((0, 0), (3, 17), (31, 30)):
            assert picture.getpixel((x, y)) == tuple(int(rows[i, 1024 * channel + 32 * y + x]) for channel in range(3))
    assert [pictures[i][1] for i in range(8)] == [0, 1, 2, classes - 1] * 2
    assert load_labeled(name, "test", root=cifar).name(3) == f"{name} test 3"


class Attack:
    """Object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["part0", "part2", "meta"])
def test_pickle_with_a_wrong_checksum_is_never_loaded(cifar: Path, tmp_path: Path, name: str) -> None:
    (cifar / datasets.CIFAR10.base_folder / name).write_bytes(pickle.dumps(Attack(tmp_path / "attacked")))
    with pytest.raises(DataError, match=rf"{name}: must have the md5 [0-9a-f]{{32}}, got another\. Download it again\.") as error:
        load_labeled("cifar10", "train", root=cifar)
    one_line(error)
    assert not (tmp_path / "attacked").exists()


def test_missing_or_incomplete_cifar_is_refused(cifar: Path) -> None:
    (cifar / datasets.CIFAR10.base_folder / "meta").unlink()
    with pytest.raises(DataError, match=r"meta: must have the md5 .*, got no file\."):
        load_labeled("cifar10", "train", root=cifar)
    with pytest.raises(
        DataError,
        match=r"cifar100: cifar-100-python not found in .*, and 127\.0\.0\.1:1 does not answer; pass its parent folder as root\.$",
    ):
        load_labeled("cifar100", "train")
