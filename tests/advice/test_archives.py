"""Archives: what is wrong with them is true, and what the message says to do works."""

from __future__ import annotations

import gzip
import os
import zipfile
from pathlib import Path

import pytest

from tests.advice.packing import BLUE, LIME, RED, owner, packed, png, shown
from visattn.batch import items_of
from visattn.errors import ImageError


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_made_again_without_the_member_is_read(kind: str, tmp_path: Path) -> None:
    file = packed(tmp_path / f"x.{kind}", {"../out.png": png(), "fine.png": png(BLUE)})
    refused, _ = items_of([file])
    with pytest.raises(ImageError, match=r"its name leads out of its folder\. Make the archive again without it\.$"):
        refused.photo()
    assert shown(packed(file, {"fine.png": png(BLUE)})) == [BLUE]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_made_again_after_damage_is_read(kind: str, tmp_path: Path) -> None:
    file = packed(tmp_path / f"x.{kind}", {"a.png": png()})
    data = bytearray(file.read_bytes())
    at = data.index(b"\x89PNG") + 40
    data[at] ^= 0xFF
    file.write_bytes(data if kind == "zip" else data[:560])
    with pytest.raises(ImageError, match=r"a\.png: cannot be read \(.*\)\. Make the archive again\.$"):
        items_of([file])[0].photo()
    assert shown(packed(file, {"a.png": png()})) == [RED]


def test_an_archive_that_is_cut_off_or_no_archive_is_made_again(tmp_path: Path) -> None:
    file = packed(tmp_path / "x.tar", {"a.png": png(), "b.png": png(BLUE)})
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.index(b"b.png") + 100])
    *_, end = items_of([file])
    with pytest.raises(ImageError, match=r"x\.tar: is damaged, or cut off, after 1 images\. Make it again\.$"):
        end.photo()
    file.write_bytes(b"no archive" * 100)
    with pytest.raises(ImageError, match=r"x\.tar: is no tar file, or damaged \(.*\)\. Make it again\.$"):
        items_of([file])
    assert shown(packed(file, {"a.png": png(), "b.png": png(BLUE)})) == [RED, BLUE]
    (tmp_path / "x.zip").write_bytes(b"no archive" * 100)
    with pytest.raises(ImageError, match=r"x\.zip: is no zip file, or damaged \(.*\)\. Make it again\.$"):
        items_of([tmp_path / "x.zip"])
    assert shown(packed(tmp_path / "x.zip", {"a.png": png()})) == [RED]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_run_over_an_archive_that_was_replaced_is_run_again(kind: str, tmp_path: Path) -> None:
    file = packed(tmp_path / f"x.{kind}", {"a.png": png()})
    (item,) = items_of([file])
    packed(file, {"b.png": png(BLUE)})
    os.utime(file, ns=(1, 1))
    with pytest.raises(ImageError, match=rf"x\.{kind}/a\.png: is not there any more\. Run the command again\.$"):
        item.photo()
    assert shown(file) == [BLUE]


def test_an_archive_that_was_moved_is_put_back(tmp_path: Path) -> None:
    file = packed(tmp_path / "x.zip", {"a.png": png()})
    (item,) = items_of([file])
    file.rename(tmp_path / "y.zip")
    with pytest.raises(ImageError, match=r"x\.zip: cannot be read \(no such file or directory\)\. Check its path\.$"):
        item.photo()
    (tmp_path / "y.zip").rename(file)
    assert item.photo().getpixel((0, 0)) == RED


def test_a_packed_archive_is_unpacked_to_tar(tmp_path: Path) -> None:
    content = packed(tmp_path / "x.tar", {"a.png": png()}).read_bytes()
    (tmp_path / "x.tar").unlink()
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(content))
    with pytest.raises(ImageError, match=r"x\.tar\.gz: its name says that it is compressed, .* Unpack it to \.tar\.$"):
        items_of([tmp_path / "x.tar.gz"])
    (tmp_path / "x.tar").write_bytes(gzip.decompress((tmp_path / "x.tar.gz").read_bytes()))
    assert shown(tmp_path / "x.tar") == [RED]


def test_a_zip_file_that_was_replaced_by_a_shorter_one_is_listed_again(tmp_path: Path) -> None:
    file = packed(tmp_path / "x.zip", {"a.png": png(), "b.png": png(BLUE)})
    item = items_of([file])[1]
    file.unlink()
    packed(file, {"b.png": png(LIME)})
    with pytest.raises(ImageError, match=r"b\.png: is not there any more\. Run the command again\.$"):
        item.photo()
    assert shown(file) == [LIME]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_address_that_fits_no_photo_is_corrected(kind: str, tmp_path: Path) -> None:
    file = packed(tmp_path / f"x.{kind}", {"a.png": png(), "notes.txt": b"b.png"})
    with pytest.raises(ImageError, match=rf"x\.{kind}: no photo in it fits the address\. Check the address\.$"):
        items_of([f"{kind}://b.png::{file}"])
    assert shown(f"{kind}://a.png::{file}") == [RED]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_list_names_members_with_long_names(kind: str, tmp_path: Path) -> None:
    name = f"{'d' * 200}/{'e' * 200}.png"
    file = packed(tmp_path / f"x.{kind}", {name: png(), f"c{name[1:]}": png(BLUE)})
    (tmp_path / "list.txt").write_text(f"{kind}://{name}::{file}\n")
    assert shown(tmp_path / "list.txt") == [RED]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_is_absent_and_not_damaged(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"x.{kind}"
    file.symlink_to("gone")
    with pytest.raises(ImageError, match=r"cannot be read \(no such file or directory\)\. Check its path\.$"):
        items_of([file])
    file.unlink()
    assert shown(packed(file, {"a.png": png()})) == [RED]
    (tmp_path / "list.txt").write_text(f"{kind}://a.png::x\0.{kind}\n")
    with pytest.raises(ImageError, match=r"cannot be read \(.*null byte.*\)\. Check its path\.$"):
        items_of([tmp_path / "list.txt"])[0].photo()


@pytest.mark.usefixtures("ordinary_user")
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_without_permission_is_not_damaged(kind: str, public_folder: Path) -> None:
    file = public_folder / f"x.{kind}"
    with owner():
        packed(file, {"a.png": png()}).chmod(0)
    with pytest.raises(
        ImageError, match=r"cannot be read \(permission denied\)\. Check its permissions and those of its folder\.$"
    ):
        items_of([file])
    with owner():
        file.chmod(0o644)
    assert shown(file) == [RED]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_is_made_again_with_a_member_once(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for content in (png(), png(BLUE)):
            archive.writestr("a.png", content)
    with pytest.raises(ImageError, match=r"is in the archive 2 times\. Make the archive again with it once\.$"):
        items_of([tmp_path / "x.zip"])
    assert shown(packed(tmp_path / "x.zip", {"a.png": png()})) == [RED]
