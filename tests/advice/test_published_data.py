"""Advice of messages about Fashion-MNIST and CIFAR: followed literally, it works."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torchvision import datasets

from tests.advice.closing import Close, closed  # noqa: F401 - a fixture
from tests.data.making import FASHION, fashion, idx, noise
from tests.data.test_archives import cifar  # noqa: F401 - a fixture
from tests.serving import Store, store  # noqa: F401 - a fixture
from visattn.data import load_labeled
from visattn.data.labeled import downloaded as published
from visattn.data.labeled.idx import read_idx
from visattn.errors import DataError


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache, and hide Debian's package of Fashion-MNIST."""
    monkeypatch.setenv("VISATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(published, "PACKAGE", tmp_path / "package")


DAMAGE: dict[str, tuple[bool, Callable[[bytes], bytes], str]] = {
    "short": (False, lambda whole: whole[:-1], r"must hold 2352 bytes of data, got 2351\. It is damaged; download it again"),
    "cut archive": (True, lambda whole: gzip.compress(whole)[:-9], r"cannot be read \(.*\)\. Download it again"),
    "a page": (
        False,
        lambda _: b"<html>",
        r"must be an idx file .*, got a file that starts with 3c 68 74 6d\. Download it again",
    ),
    "another set": (False, lambda _: idx(noise(3, 28, 27)), r"must have the shape \(N, 28, 28\), .*\. Pass the files of this"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_idx_files_that_are_downloaded_again_are_read(name: str, tmp_path: Path) -> None:
    packed, damage, message = DAMAGE[name]
    pixels = noise(3, 28, 28)
    fashion(tmp_path, "train", pixels, [0, 1, 2], packed=packed)
    file = tmp_path / (FASHION["train"][0] + (".gz" if packed else ""))
    file.write_bytes(damage(idx(pixels)))
    with pytest.raises(DataError, match=message):
        load_labeled("fashion-mnist", "train", root=tmp_path)
    fashion(tmp_path, "train", pixels, [0, 1, 2], packed=packed)
    assert np.array_equal(np.asarray(load_labeled("fashion-mnist", "train", root=tmp_path)[1][0]), pixels[1])


def test_files_that_cannot_be_downloaded_are_passed_as_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fashion(tmp_path / "files", "train", noise(3, 28, 28), [0, 1, 2])
    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", ["http://127.0.0.1:1/"])
    with pytest.raises(
        DataError, match=r"127\.0\.0\.1:1 does not answer; install it with: .*; or pass the folder of its idx files as"
    ):
        load_labeled("fashion-mnist", "train")

    def broken(*_: object) -> None:
        raise RuntimeError("File not found or corrupted.")

    monkeypatch.setattr(published, "_refusal", lambda _: "")
    monkeypatch.setattr(datasets.FashionMNIST, "download", broken)
    with pytest.raises(DataError, match=r"the download failed \(File not found or corrupted\.\); install it .* pass the folder"):
        load_labeled("fashion-mnist", "train")
    assert len(load_labeled("fashion-mnist", "train", root=tmp_path / "files")) == 3


def test_cifar_is_downloaded_again_or_passed_as_root(cifar: Path) -> None:  # noqa: F811
    with pytest.raises(DataError, match=r"cifar10: cifar-10-batches-py not found in .* pass its parent folder as root"):
        load_labeled("cifar10", "train")
    part = cifar / datasets.CIFAR10.base_folder / "part0"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"part0: must have the md5 .*, got another\. Download it again"):
        load_labeled("cifar10", "train", root=cifar)
    part.write_bytes(whole)
    assert len(load_labeled("cifar10", "train", root=cifar)) == 8


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (lambda whole: whole[:10], r"must have a header of 16 bytes, got 10\. It is damaged; download it again"),
        (
            lambda whole: whole[:4] + b"\xff" * 4 + whole[8:],
            r"must hold at most 2147483648 bytes of data, its header states \d+\. Download it again",
        ),
    ],
    ids=["header", "length"],
)
def test_a_damaged_header_is_told_as_such(spoiled: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(spoiled(idx(noise(3, 28, 28))))
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "x", (28, 28))


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_content_of_a_file_decides_whether_it_is_packed(packed: bool, ending: str, tmp_path: Path) -> None:
    pixels = noise(3, 28, 28)
    (tmp_path / f"x{ending}").write_bytes(gzip.compress(idx(pixels)) if packed else idx(pixels))
    assert np.array_equal(read_idx(tmp_path / f"x{ending}", (28, 28)), pixels)


def test_a_server_that_refuses_answers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", [store.url("")])
    with pytest.raises(DataError, match=r"127\.0\.0\.1:\d+ answers 404 Not Found; install it with"):
        load_labeled("fashion-mnist", "train")


@pytest.mark.parametrize("place", [".", "train-images-idx3-ubyte"])
def test_permissions_of_files_of_fashion_mnist_are_checked(place: str, public_folder: Path, closed: Close) -> None:  # noqa: F811
    fashion(public_folder / "files", "train", noise(3, 28, 28), [0, 1, 2], packed=False)
    reopen = closed(public_folder / "files" / place)
    with pytest.raises(
        DataError, match=r"files.*: cannot be read \(permission denied\)\. Check its permissions and those of its folder"
    ):
        load_labeled("fashion-mnist", "train", root=public_folder / "files")
    reopen()
    assert len(load_labeled("fashion-mnist", "train", root=public_folder / "files")) == 3


@pytest.mark.parametrize("place", [".", "part0"])
def test_permissions_of_files_of_cifar_are_checked(
    place: str,
    public_folder: Path,
    closed: Close,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = public_folder / datasets.CIFAR10.base_folder
    files.mkdir()
    (files / "part0").touch()
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [["part0", "0" * 32]])
    reopen = closed(files / place)
    message = r"part0: cannot be read \(permission denied\)\. Check its permissions and those of its folder"
    with pytest.raises(DataError, match=message):
        load_labeled("cifar10", "train", root=public_folder)
    reopen()
    with pytest.raises(DataError, match="must have the md5"):
        load_labeled("cifar10", "train", root=public_folder)
