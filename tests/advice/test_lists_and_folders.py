"""Lists, folders and addresses of images, and names of results: what the message says to do works."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from tests import tiny
from tests.advice.packing import LIME, PHOTO, RED, owner, packed, png, shown
from tests.batch.kills import go
from visattn._support.types import MapFormat
from visattn.batch import Asked, Batches, Entry, Journal, Ledger, Outcome, Wanted, Work, items_of, run
from visattn.batch.remote import STORES, remote_files
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.question import ask
from visattn.errors import ImageError


def test_a_remote_file_with_a_reserved_name_is_renamed() -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/advice/NUL.png", png())
    (item,) = remote_files("memory://advice", [".png"])
    assert item.content is not None
    with pytest.raises(ImageError, match=r"memory:///advice/NUL\.png: its name is reserved on some systems\. Rename it\.$"):
        item.content(1 << 20)
    files.mv("/advice/NUL.png", "/advice/null.png")
    assert shown("memory://advice") == [RED]
    files.rm("/advice", recursive=True)


def test_an_address_that_cannot_be_listed_or_opened_is_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/advice/x.zip", packed(tmp_path / "x.zip", {"a.png": png(LIME)}).read_bytes())
    with pytest.raises(ImageError, match=r"y\.zip: cannot be opened \(.*y\.zip.*\)\. Check the address, "):
        items_of(["zip://a.png::memory://advice/y.zip"])[0].photo()
    assert shown("zip://a.png::memory://advice/x.zip") == [LIME]
    files.rm("/advice", recursive=True)
    packed(tmp_path / "outer.zip", {"x.zip": (tmp_path / "x.zip").read_bytes()})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImageError, match=r"other\.zip cannot be read \(no such file or directory\)\. Check the address\.$"):
        items_of(["zip://a.png::zip://x.zip::other.zip"])
    assert shown("zip://a.png::zip://x.zip::outer.zip") == [LIME]


def test_an_address_of_an_unknown_kind_is_replaced_by_a_known_one(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    with pytest.raises(ImageError, match=r"'nonsense' is not a file system that is read here\. Known: .*memory.*file"):
        items_of([f"nonsense://{tmp_path}/a.png"])
    assert shown(f"file://{tmp_path}/a.png") == [RED]


def test_an_address_without_a_name_is_replaced() -> None:
    with pytest.raises(ImageError, match=r"x/\.: the name '' is empty\. Pass another address\.$"):
        items_of(["http://127.0.0.1:1/x/."])
    assert [item.name for item in items_of(["http://127.0.0.1:1/x/a.png"])] == ["a"]


# --- images of a run


def test_each_kind_of_input_that_is_named_gives_images(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"no images were given\. Pass files, folders, patterns or lists\.$"):
        items_of([])
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "list.txt").write_text("a.png\n")
    for given in (tmp_path / "a.png", tmp_path, str(tmp_path / "*.png"), tmp_path / "list.txt"):
        assert shown(given) == [RED]


def test_paths_patterns_and_folders_without_photos_are_corrected(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(png())
    for wrong, message in (
        ("foto/a.png", r"foto/a\.png: no such file; check the path$"),
        ("photos/*.jpg", r"photos/\*\.jpg: found no file for this pattern, .*\. Check the path .*, and quote the pattern\.$"),
        ("empty", r"empty: no visible photos \(.*\) in this folder or its subfolders\. Pass another\.$"),
    ):
        with pytest.raises(ImageError, match=message):
            items_of([f"{tmp_path}/{wrong}"])
    for right in ("photos/a.png", "photos/*.png", "photos"):
        assert shown(f"{tmp_path}/{right}") == [RED]


def test_another_output_folder_leaves_the_photos(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    with pytest.raises(ImageError, match=r"is the output folder too\. Choose another\.$"):
        items_of([tmp_path], but=tmp_path)
    assert [item.name for item in items_of([tmp_path], but=tmp_path / "out")] == ["a"]


@pytest.mark.usefixtures("ordinary_user")
def test_permissions_of_a_folder_are_corrected(public_folder: Path) -> None:
    with owner():
        (public_folder / "photos" / "sub").mkdir(parents=True)
        (public_folder / "photos" / "sub" / "a.png").write_bytes(png())
        (public_folder / "photos" / "sub").chmod(0)
    with pytest.raises(
        ImageError, match=r"photos/sub: cannot be read \(permission denied\)\. Check its permissions and those of its folder\.$"
    ):
        items_of([public_folder / "photos"])
    with owner():
        (public_folder / "photos" / "sub").chmod(0o755)
    assert shown(public_folder / "photos") == [RED]


def test_lists_are_corrected(tmp_path: Path) -> None:
    (tmp_path / "ä.png").write_bytes(png())
    for name, content, message, better in (
        ("a.txt", b"\n", r"a\.txt: lists no images\. Write a path on each line, ", "ä.png\n"),
        ("a.txt", b"/\n", r"a\.txt, line 1: '/' names no file\. Correct the line\.$", "ä.png\n"),
        ("a.txt", "ä.png\n".encode("latin-1"), r"a\.txt: cannot be read as text \(.*\)\. Save it as UTF-8\.$", "ä.png\n"),
        ("a.csv", b"image\n\n", r"a\.csv: lists no images\. .* in a CSV file into the column of images\.$", "image\nä.png\n"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ImageError, match=message):
            shown(tmp_path / name)
        (tmp_path / name).write_text(better, encoding="utf-8")
        assert shown(tmp_path / name) == [RED]


def test_an_archive_named_as_a_journal_is_renamed(tmp_path: Path) -> None:
    file = packed(tmp_path / "journal.old.jsonl.zip", {"a.png": png()})
    with pytest.raises(
        ImageError, match=r"the name journal\.old\.jsonl is kept for journals of runs\. Rename that folder or archive\.$"
    ):
        items_of([file])
    assert shown(file.rename(tmp_path / "old.zip")) == [RED]


def test_a_folder_named_as_a_journal_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "photos" / "journal.old.jsonl").mkdir(parents=True)
    (tmp_path / "photos" / "journal.old.jsonl" / "a.png").write_bytes(png())
    with pytest.raises(ImageError, match=r"the name journal\.old\.jsonl is kept for journals of runs\. Rename that folder"):
        items_of([tmp_path / "photos"])
    (tmp_path / "photos" / "journal.old.jsonl").rename(tmp_path / "photos" / "old")
    assert shown(tmp_path / "photos") == [RED]


def test_a_file_that_a_list_may_not_name_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "con.png").write_bytes(png())
    (tmp_path / "list.txt").write_text("con.png\n")
    with pytest.raises(ImageError, match=r"'con\.png' is reserved on some systems\. Rename the file, and correct the line\.$"):
        items_of([tmp_path / "list.txt"])
    (tmp_path / "con.png").rename(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png\n")
    assert shown(tmp_path / "list.txt") == [RED]


@pytest.mark.usefixtures("ordinary_user")
def test_permissions_of_lists_and_of_folders_of_files_are_corrected(public_folder: Path) -> None:
    sub = public_folder / "sub"
    with owner():
        sub.mkdir()
        (sub / "a.png").write_bytes(png())
        (public_folder / "list.txt").write_text("sub/a.png\n")
        for closed in (sub, public_folder / "list.txt"):
            closed.chmod(0)
    given = sub / "a.png", public_folder / "list.txt"
    for one in given:
        with pytest.raises(
            ImageError, match=r"cannot be read \(permission denied\)\. Check its permissions and those of its folder\.$"
        ):
            items_of([one])
    with pytest.raises(ImageError, match=r"found no file for this pattern, .*\. Check the path and its permissions, "):
        items_of([f"{sub}/*.png"])
    with owner():
        for closed in (sub, public_folder / "list.txt"):
            closed.chmod(0o755)
    assert shown(*given, f"{sub}/*.png") == [RED] * 3


def test_a_list_that_is_gone_is_not_a_matter_of_its_text(tmp_path: Path) -> None:
    (tmp_path / "list.txt").symlink_to("gone.txt")
    with pytest.raises(ImageError, match=r"cannot be read \(no such file or directory\)\. Check its path\.$"):
        items_of([tmp_path / "list.txt"])


def test_every_file_system_that_is_named_is_known_to_fsspec() -> None:
    assert {*STORES} - {*fsspec.available_protocols()} <= {"abfss"}  # adlfs registers it


@pytest.mark.parametrize(("ending", "most"), [("npz", 243), ("png", 239)])
def test_an_image_whose_name_is_too_long_is_renamed(ending: MapFormat, most: int, tmp_path: Path) -> None:
    photo, out, entries = tmp_path / "photos" / f"{'a' * 244}.png", tmp_path / "out", list[Entry]()
    for folder in (photo.parent, out):
        folder.mkdir()
    PHOTO.save(photo)

    def explained() -> Outcome:
        work = Work(Asked(ask("rollout"), Preprocessing()), Wanted(out, "rollout", raw=True, raw_ending=ending))
        with Journal(out / "journal.jsonl", {}) as journal:
            return run(tiny.vit(), Ledger(items_of([photo.parent]), journal, Batches(1), entries.append), work)

    assert explained().failed == 1
    assert entries[0].error == f"its name is too long for files that are named by it. Rename it to at most {most} bytes."
    photo.rename(photo.with_name(f"{'a' * most}.png"))
    assert explained() == Outcome(1, 0, 0)


def test_a_file_where_a_folder_should_be_is_removed_or_another_folder_chosen(tmp_path: Path) -> None:
    (tmp_path / "photos" / "b").mkdir(parents=True)
    PHOTO.save(tmp_path / "photos" / "b" / "c.png")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b").write_text("a file where a folder should be")
    entries: list[Entry] = []
    assert go(tiny.vit(), items_of([tmp_path / "photos"]), tmp_path / "out", told=entries.append).failed == 1
    assert entries[0].error.endswith("out/b: is no folder. Remove it, or choose another folder.")
    assert go(tiny.vit(), items_of([tmp_path / "photos"]), tmp_path / "other") == Outcome(1, 0, 0)
    (tmp_path / "out" / "b").unlink()
    assert go(tiny.vit(), items_of([tmp_path / "photos"]), tmp_path / "out") == Outcome(1, 0, 0)
