from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from visattn._support.files import cache_folder
from visattn._support.whole_files import (
    building_file,
    building_folder,
    check_folder,
    check_output,
    check_outputs,
    remove_unfinished,
    result_names,
    write_folder_whole,
    write_whole,
)
from visattn.errors import OutputError, ResourceError

NEW, OLD = b"new" * 1000, b"old"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 300 KiB."""
    yield from mounted(tmp_path / "small", "size=300k")


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk that not even root can write."""
    yield from mounted(tmp_path / "frozen", "size=64k,ro")


def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if done.returncode:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


# ---- check_output -----------------------------------------------------------------------------------------------------------------


def test_new_file_is_allowed_and_not_created(tmp_path: Path) -> None:
    assert check_output(tmp_path / "out.png") == tmp_path / "out.png"
    assert names(tmp_path) == []


def test_existing_output_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "out.png").write_bytes(OLD)
    with pytest.raises(OutputError, match=r"out\.png: exists already; pass overwrite=True to replace it or choose another name$"):
        check_output(tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes() == OLD


def test_existing_output_is_allowed_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out.png").write_bytes(OLD)
    check_output(tmp_path / "out.png", overwrite=True)
    assert (tmp_path / "out.png").read_bytes() == OLD


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("way", ["same", "symlink", "hard link", "other spelling", "link to the folder"])
def test_output_that_is_the_input_is_refused(way: str, overwrite: bool, tmp_path: Path) -> None:
    source = tmp_path / "photo.png"
    source.write_bytes(OLD)
    (tmp_path / "sub").mkdir()
    (tmp_path / "twin").symlink_to(tmp_path)
    (tmp_path / "soft.png").symlink_to(source)
    (tmp_path / "hard.png").hardlink_to(source)
    output = {
        "same": source,
        "symlink": tmp_path / "soft.png",
        "hard link": tmp_path / "hard.png",
        "other spelling": tmp_path / "sub" / ".." / "photo.png",
        "link to the folder": tmp_path / "twin" / "photo.png",
    }[way]
    with pytest.raises(OutputError, match=r"the output is the input itself; choose another name$"):
        check_output(output, overwrite=overwrite, inputs=[tmp_path / "other.png", source])
    assert source.read_bytes() == OLD


def test_input_that_is_a_link_to_the_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real.png").write_bytes(OLD)
    (tmp_path / "link.png").symlink_to("real.png")
    with pytest.raises(OutputError, match="the output is the input itself"):
        check_output(tmp_path / "real.png", overwrite=True, inputs=[tmp_path / "link.png"])


def test_result_names_are_unique() -> None:
    assert result_names([Path("a/x.jpg"), Path("b/y.png")]) == ["x", "y"]
    assert result_names([Path("x.jpg"), Path("x.png"), Path("y.png")]) == ["x.jpg", "x.png", "y"]
    assert result_names([Path("a/x.jpg"), Path("b/x.jpg")]) == ["1.x.jpg", "2.x.jpg"]
    assert result_names([Path("a/X.jpg"), Path("b/x.JPG")]) == ["1.X.jpg", "2.x.JPG"]
    assert result_names([Path("x.jpg"), Path("x.jpg")]) == ["1.x.jpg", "2.x.jpg"]


def test_two_outputs_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for other in ("out.png", "OUT.png", "./out.png", "link/out.png"):
        with pytest.raises(OutputError, match="two results would be written to this file"):
            check_outputs([tmp_path / "out.png", tmp_path / other])
    check_outputs([tmp_path / "out.png", tmp_path / "other.png"])


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_as_output_is_refused(overwrite: bool, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"is a folder; name a file in it, for example .*/out\.png"):
        check_output(tmp_path, overwrite=overwrite)


def test_missing_folder_is_created(tmp_path: Path) -> None:
    check_output(tmp_path / "a" / "b" / "out.png")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("below", ["out.png", "deeper/out.png"])
def test_file_where_the_folder_should_be_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    with pytest.raises(OutputError, match="is a file, not a folder; choose another folder"):
        check_output(tmp_path / "file" / below)
    assert (tmp_path / "file").read_bytes() == OLD


def test_read_only_disk_is_refused(frozen_disk: Path) -> None:
    with pytest.raises(OutputError, match=r"out\.png: cannot be written \(read-only file system\); choose a writable folder"):
        check_output(frozen_disk / "out.png")


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["readable", "closed"])
def test_folder_without_write_permission_is_refused(mode: int, public_folder: Path, request: pytest.FixtureRequest) -> None:
    folder = public_folder / "locked"
    folder.mkdir()
    folder.chmod(mode)
    request.getfixturevalue("ordinary_user")
    with pytest.raises(OutputError, match=r"cannot be written \(permission denied\)"):
        check_output(folder / "out.png")


@pytest.mark.parametrize("name", ["x" * 300 + ".png", "a\0b.png"], ids=["too long", "NUL"])
def test_impossible_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        check_output(tmp_path / name)


def test_check_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "out.png").write_bytes(OLD)
    check_output(tmp_path / "out.png", overwrite=True, inputs=[tmp_path / "in.png"])
    assert names(tmp_path) == ["out.png"]


@pytest.mark.parametrize(
    "name", ["line\nbreak.png", os.fsdecode(b"bad\xff.png"), "\u202egnp.exe"], ids=["newline", "bytes", "rtl"]
)
def test_odd_name_is_shown_on_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(OLD)
    with pytest.raises(OutputError) as caught:
        check_output(tmp_path / name)
    assert str(caught.value).isprintable()


# ---- write_whole ------------------------------------------------------------------------------------------------------------------


def test_content_is_written_and_nothing_else(tmp_path: Path) -> None:
    assert write_whole(tmp_path / "out.png", NEW) == tmp_path / "out.png"
    assert (tmp_path / "out.png").read_bytes() == NEW
    assert names(tmp_path) == ["out.png"]


def test_old_content_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out.png").write_bytes(OLD)
    write_whole(tmp_path / "out.png", NEW)
    assert (tmp_path / "out.png").read_bytes() == NEW


@pytest.mark.parametrize(
    "name",
    ["x" * 251 + ".png", os.fsdecode(b"bad\xff.png"), "-rf.png", "line\nbreak.png"],
    ids=["255 bytes", "bytes", "dash", "newline"],
)
def test_odd_name_is_written(name: str, tmp_path: Path) -> None:
    write_whole(tmp_path / name, NEW)
    assert names(tmp_path) == [name]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o000, 0o666)], ids=oct)
def test_mode_follows_the_umask(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "out.png", NEW)
        assert os.umask(mask) == mask  # the umask is restored
    finally:
        os.umask(before)
    assert (tmp_path / "out.png").stat().st_mode & 0o777 == mode


def test_link_is_replaced_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(OLD)
    (tmp_path / "out.png").symlink_to("photo.png")
    write_whole(tmp_path / "out.png", NEW)
    assert (tmp_path / "photo.png").read_bytes() == OLD


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (errno.ENOSPC, ResourceError, r"out\.png: disk full; free some space"),
        (errno.EDQUOT, ResourceError, r"out\.png: disk full; free some space"),
        (errno.EIO, OutputError, r"out\.png: cannot be written \(input/output error\); choose a writable folder"),
    ],
    ids=["disk full", "quota", "broken disk"],
)
def test_failure_keeps_the_old_content_and_no_partial_file(
    number: int, error: type[OSError], message: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    (tmp_path / "out.png").write_bytes(OLD)
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(error, match=message):
        write_whole(tmp_path / "out.png", NEW)
    assert (tmp_path / "out.png").read_bytes() == OLD
    assert names(tmp_path) == ["out.png"]


def test_interrupt_keeps_the_old_content_and_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> NoReturn:
        raise KeyboardInterrupt

    (tmp_path / "out.png").write_bytes(OLD)
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "out.png", NEW)
    assert (tmp_path / "out.png").read_bytes() == OLD
    assert names(tmp_path) == ["out.png"]


def test_full_disk_is_a_resource_error_and_keeps_the_old_content(small_disk: Path) -> None:
    (small_disk / "out.png").write_bytes(OLD)
    with pytest.raises(ResourceError, match=r"out\.png: disk full; free some space or choose another folder$"):
        write_whole(small_disk / "out.png", bytes(400_000))
    assert (small_disk / "out.png").read_bytes() == OLD
    assert names(small_disk) == ["out.png"]


def test_files_written_before_the_disk_was_full_are_complete(small_disk: Path) -> None:
    write_whole(small_disk / "first.png", bytes(200_000))
    with pytest.raises(ResourceError):
        write_whole(small_disk / "second.png", bytes(200_000))
    assert names(small_disk) == ["first.png"]
    assert (small_disk / "first.png").stat().st_size == 200_000


def test_missing_folder_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot be written \(no such file or directory\)"):
        write_whole(tmp_path / "gone" / "out.png", NEW)


def test_existing_folder_is_an_output_error_and_leaves_no_partial_file(tmp_path: Path) -> None:
    (tmp_path / "out.png").mkdir()
    with pytest.raises(OutputError, match=r"is a folder, not a regular file; choose another name"):
        write_whole(tmp_path / "out.png", NEW)
    assert names(tmp_path) == ["out.png"]


# ---- cache_folder -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"VISATTN_CACHE": "/chosen", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/u"}, "/chosen"),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/u"}, "/xdg/visattn"),
        ({"HOME": "/home/u"}, "/home/u/.cache/visattn"),
    ],
    ids=["VISATTN_CACHE", "XDG_CACHE_HOME", "HOME"],
)
def test_cache_folder_follows_environment_variables(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VISATTN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


# ---- folders ----------------------------------------------------------------------------------------------------------------------

KNOWN = ("a.csv", "b.png")


def test_folder_is_written_atomically_with_the_default_mode(tmp_path: Path) -> None:
    target = check_folder(tmp_path / "deeper" / "out", KNOWN)
    assert names(tmp_path / "deeper") == []
    (tmp_path / "plain").mkdir()
    assert write_folder_whole(target, {"a.csv": NEW, "b.png": OLD}, KNOWN) == [target / "a.csv", target / "b.png"]
    assert (target / "a.csv").read_bytes() == NEW
    assert names(target.parent) == ["out"]
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_existing_folder_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    target = tmp_path / "out"
    write_folder_whole(target, {"a.csv": OLD, "b.png": OLD}, KNOWN)
    with pytest.raises(OutputError, match=r"out: exists already; pass overwrite=True to replace it or choose another name$"):
        check_folder(target, KNOWN)
    write_folder_whole(check_folder(target, KNOWN, overwrite=True), {"a.csv": NEW}, KNOWN)
    assert names(target) == ["a.csv"]  # a b.png left from an earlier run would be mistaken for a result of this run
    assert names(tmp_path) == ["out"]


def test_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_bytes(OLD)
    for refused in (
        lambda: check_folder(target, KNOWN, overwrite=True),
        lambda: write_folder_whole(target, {"a.csv": NEW}, KNOWN),  # it may have appeared after the check
    ):
        with pytest.raises(OutputError, match=r"out: holds mine\.txt, which would be lost; choose another folder$"):
            refused()
    assert names(target) == ["mine.txt"]
    assert names(tmp_path) == ["out"]


def test_file_or_current_folder_is_refused_as_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_bytes(OLD)
    with pytest.raises(OutputError, match=r"out: is a file, not a folder; choose another name$"):
        check_folder(tmp_path / "out", KNOWN, overwrite=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OutputError, match=r"\.: is the current folder, which cannot be replaced; name a folder in it"):
        check_folder(Path(), KNOWN, overwrite=True)


def test_full_disk_keeps_the_earlier_folder(small_disk: Path) -> None:
    target = small_disk / "out"
    write_folder_whole(target, {"a.csv": OLD}, KNOWN)
    with pytest.raises(ResourceError, match=r"disk full; free some space"):
        write_folder_whole(target, {"a.csv": NEW, "b.png": b"x" * 400_000}, KNOWN)
    assert (target / "a.csv").read_bytes() == OLD
    assert names(small_disk) == ["out"]


def test_failed_rename_restores_the_earlier_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    write_folder_whole(target, {"a.csv": OLD}, KNOWN)
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if self.name.startswith(".visattn-") and self.suffix != ".former":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OutputError, match=r"out: cannot be written \(input/output error\)"):
        write_folder_whole(target, {"a.csv": NEW}, KNOWN)
    assert (target / "a.csv").read_bytes() == OLD
    assert names(tmp_path) == ["out"]


def test_folder_behind_a_link_is_replaced_and_the_link_kept(tmp_path: Path) -> None:
    write_folder_whole(tmp_path / "real", {"a.csv": OLD}, KNOWN)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_folder_whole(tmp_path / "link", {"a.csv": NEW}, KNOWN)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a.csv").read_bytes() == NEW


@pytest.mark.parametrize(
    "make", [Path.mkdir, lambda path: path.symlink_to("elsewhere"), os.mkfifo], ids=["folder", "link", "pipe"]
)
def test_folder_with_a_known_name_that_is_not_a_file_is_never_replaced(tmp_path: Path, make: Callable[[Path], object]) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out" / "heads.csv")
    with pytest.raises(OutputError, match=r"out: holds heads\.csv, which would be lost; choose another folder$"):
        write_folder_whole(tmp_path / "out", {"heads.csv": b""}, ("heads.csv",))
    assert os.path.lexists(tmp_path / "out" / "heads.csv")


def test_what_a_signal_leaves_while_it_is_removed_is_removed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt), building_folder(tmp_path / "out"):
            raise ValueError
    assert names(tmp_path)
    remove_unfinished()
    assert not list(tmp_path.iterdir())


def test_a_child_leaves_the_unfinished_files_of_its_parent(tmp_path: Path) -> None:
    with building_file(tmp_path / "out.txt") as place:
        child = os.fork()
        if child == 0:
            remove_unfinished()
            os._exit(0)
        os.waitpid(child, 0)
        place.write_bytes(NEW)
    assert (tmp_path / "out.txt").read_bytes() == NEW
