"""Doors of a run: names that look like code, names that lead out, archives, lists, links, limits. Nothing runs, nothing is mixed."""

from __future__ import annotations

import inspect
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.test_commands import Run, run
from visattn import load_image, load_map
from visattn._support.outside import fault_of, folded
from visattn._support.whole_files import check_output, write_whole
from visattn.batch import archives, items_of
from visattn.core.images.loading import bounded
from visattn.errors import ImageError, MapError, OutputError

__all__ = ["run"]

CANARY = "from pathlib import Path\nPath(__file__).with_name('RAN').touch()\ndef f():\n    return []\n"
MODEL = "--model", "own.py:vit", "--method", "rollout", "--opacity", "0", "--no-marks"
OWN = """import timm, torch
def vit():
    torch.manual_seed(0)
    return timm.create_model('vit_tiny_patch16_224', depth=1, img_size=32)
"""


def png(color: str | tuple[int, int, int] = "red") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def place(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model, a canary that notes when it runs, and a photo, and go there."""
    work = tmp_path / "a" / "b" / "work"
    (work / "photos").mkdir(parents=True)
    (work / "own.py").write_text(OWN)
    (work / "photos" / "x.py").write_text(CANARY)
    (work / "photos" / "good.png").write_bytes(png())
    monkeypatch.chdir(work)
    return work


def outside(place: Path) -> list[str]:
    """Return all files outside the working folder."""
    return sorted(
        str(path) for path in place.parents[1].rglob("*") if place not in path.parents and path not in (place, place.parent)
    )


@pytest.mark.parametrize("name", ["x.py:1.jpg", "x.py:f", "photo:chelsea", "scene:3", "https:a.png", "a*.png"])
def test_what_exists_as_a_file_is_a_file(name: str, place: Path, run: Run) -> None:
    (place / "photos" / name).write_bytes(png((0, 0, 255)))
    os.chdir(place / "photos")
    (place / "photos" / "own.py").write_text(OWN)
    assert load_image(name).getpixel((0, 0)) == (0, 0, 255)
    (item,) = items_of([name])
    assert item.photo().getpixel((0, 0)) == (0, 0, 255)
    code, _, err = run("batch", name, *MODEL, "-o", "../out")
    assert code == 0, err
    assert not (place / "photos" / "RAN").exists()
    (drawn,) = (place / "out").glob("*.png")
    with Image.open(drawn) as picture:
        assert picture.convert("RGB").getpixel((4, 4)) == (0, 0, 255)


@pytest.mark.parametrize("line", ["photos/x.py:f", "x.py:f", "./photos/x.py:f"])
def test_a_line_of_a_list_never_runs_code(line: str, place: Path, run: Run) -> None:
    (place / "list.txt").write_text(f"{line}\nphotos/good.png\n")
    code, _, err = run("batch", "list.txt", *MODEL, "-o", "out")
    assert code == 1
    assert "x.py:f" in err
    assert not (place / "photos" / "RAN").exists()
    assert (place / "out" / "good.rollout.png").exists()


def test_code_runs_only_where_it_is_named(place: Path, run: Run) -> None:
    with pytest.raises(ImageError, match=r"x.py:1.jpg: no such file"):
        items_of(["photos/x.py:1.jpg"])
    with pytest.raises(ImageError, match=r"x.txt:f: no such file"):
        items_of(["photos/x.txt:f"])
    assert not (place / "photos" / "RAN").exists()
    items_of(["photos/x.py:f", "photos/good.png"])
    assert (place / "photos" / "RAN").exists()


def test_a_configuration_names_no_code(place: Path, run: Run) -> None:
    for setting in ('data = "photos/x.py:f"', 'model = "photos/x.py:f"'):
        (place / "recipe.toml").write_text(f"{setting}\n")
        code, _, err = run("train", "classify", "--config", "recipe.toml", "-o", "run")
        assert code == 2
        assert f"recipe.toml: {setting.partition(' ')[0]} names Python code, which a configuration does not run" in err
        assert not (place / "photos" / "RAN").exists()
    (place / "recipe.toml").write_text('data = "photos/x.py:f"\n')
    assert run("train", "classify", "--config", "recipe.toml", "--data", "photos/x.py:f", "--dry-run", "-o", "run")[0] == 0


JINJA = "{{ ().__class__.__base__.__subclasses__() | length }}"


@pytest.mark.parametrize("where", ["operand", "line"])
@pytest.mark.parametrize("scheme", ["reference", "simplecache", "filecache", "blockcache", "dir", "generic", "nonsense"])
def test_file_systems_that_evaluate_or_keep_what_they_read_are_refused(
    scheme: str, where: str, place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "refs.json").write_text(json.dumps({"version": 1, "templates": {"u": JINJA}, "refs": {"a.png": ["{{u}}"]}}))
    address = (
        f"{scheme}://a.png::file://{place}/refs.json" if scheme != "simplecache" else f"simplecache::file://{place}/refs.json"
    )
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)  # importing it would fail
    (place / "list.txt").write_text(f"{address}\n")
    code, _, err = run("batch", address if where == "operand" else "list.txt", "photos/good.png", *MODEL, "-o", "out")
    assert code == 1
    assert f"'{scheme}' is not a file system that is read here" in err
    assert (place / "out" / "good.rollout.png").exists()


HOSTILE = {
    "../../../ESC.png": "leads out",
    "/tmp/ESC.png": "is absolute",
    "a/../../../ESC.png": "leads out",
    "C:/ESC.png": "is absolute",
    "a\\..\\ESC.png": "control characters or backslashes",
    "a\x1b]0;x\x07.png": "control characters",
    "\u202egnp.exe.png": "control characters",
    "a" * 5000 + ".png": "is longer than",
    "d/" * 1500 + "a.png": "has 1501 folders",
    "NUL.png": "is reserved",
    "com1.more.png": "is reserved",
}


@pytest.mark.parametrize("kind", ["tar", "zip", "fsspec"])
@pytest.mark.parametrize("name", HOSTILE)
def test_one_rule_for_names_from_outside(kind: str, name: str, place: Path, run: Run) -> None:
    file = place / ("x.tar" if kind == "tar" else "x.zip")
    members = {name: png("blue"), "fine.png": png("lime")}
    if kind == "tar":
        with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as archive:
            for member, content in members.items():
                facts = tarfile.TarInfo(member)
                facts.size = len(content)
                archive.addfile(facts, io.BytesIO(content))
    else:
        with zipfile.ZipFile(file, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
    before = outside(place)
    code, _, err = run("batch", f"zip://::{file}" if kind == "fsspec" else file, *MODEL, "-o", "out")
    lines = [line for line in err.splitlines() if "error" in line]
    made = sorted(str(path.relative_to(place / "out")) for path in (place / "out").rglob("*.png"))
    assert outside(place) == before
    assert [Path(path).name for path in made] == ["fine.rollout.png"]
    assert code == 1, err
    assert len(lines) == 1
    assert HOSTILE[name] in lines[0]


def test_the_rule_itself() -> None:
    for name, fault in HOSTILE.items():
        assert fault in str(fault_of(name)), name
    for name in ("a.png", "./a//b.png", "ä/日本 ☂.png", "nullable.png", "..a.png", "a:b.png", "com.png", "b\udcff.png"):
        assert fault_of(name) is None, name
    assert fault_of("") == fault_of("./") == "is empty"
    assert folded("STRASSE.png") == folded("straße.PNG")
    assert folded("e\u0301") == folded("\u00c9")
    assert folded("a") != folded("b")


def test_names_that_differ_by_case_or_unicode_form_get_files_of_their_own(place: Path, run: Run) -> None:
    with tarfile.open(place / "x.tar", "w") as archive:
        for number, name in enumerate(("A.png", "a.png", "e\u0301.png", "\u00e9.png")):
            facts = tarfile.TarInfo(name)
            content = png((60 * number, 0, 0))
            facts.size = len(content)
            archive.addfile(facts, io.BytesIO(content))
    code, _, err = run("batch", "x.tar", *MODEL, "-o", "out")
    assert code == 0, err
    pictures = list((place / "out").rglob("*.png"))
    assert len(pictures) == len({folded(str(path)) for path in pictures}) == 4


def test_members_that_share_a_name_are_refused(place: Path) -> None:
    for kind in ("tar", "zip"):
        file = place / f"x.{kind}"
        if kind == "tar":
            with tarfile.open(file, "w") as archive:
                for color in ("red", "blue"):
                    facts = tarfile.TarInfo("a.png")
                    facts.size = len(png(color))
                    archive.addfile(facts, io.BytesIO(png(color)))
        else:
            with zipfile.ZipFile(file, "w") as packed:
                packed.writestr("a.png", png("red"))
                with pytest.warns(UserWarning, match="Duplicate name"):
                    packed.writestr("a.png", png("blue"))
        with pytest.raises(ImageError, match=rf"x.{kind}/a.png: is in the archive 2 times"):
            items_of([file])
        Image.new("RGB", (8, 8)).save(place / "b.png")
        first, second, _ = items_of([file, place / "b.png"])
        for item in (first, second):
            with pytest.raises(ImageError, match="is in the archive 2 times"):
                item.photo()


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs the program tar")
@pytest.mark.parametrize(
    "form", ["gnu", "posix --sparse-version=0.0", "posix --sparse-version=0.1", "posix --sparse-version=1.0"]
)
def test_sparse_members_are_read_right(form: str, place: Path, run: Run) -> None:
    """Pack a photo with a hole of zeros after its end, and others: each picture must show its own photo."""
    for number in range(3):
        Image.new("RGB", (300, 300), (80 * number + 20, 0, 0)).save(place / f"{number}.bmp")
    with (place / "0.bmp").open("ab") as stream:
        stream.truncate(2**21)
    kind, *more = form.split()
    subprocess.run(["tar", "-S", f"--format={kind}", *more, "-cf", "x.tar", "0.bmp", "1.bmp", "2.bmp"], cwd=place, check=True)
    assert (place / "x.tar").stat().st_size < 2**21, "the member is sparse"
    code, _, err = run("batch", "x.tar", *MODEL, "-o", "out")
    assert code == 0, err
    for number in range(3):
        with Image.open(place / "out" / "x" / f"{number}.rollout.png") as picture:
            assert picture.convert("RGB").getpixel((150, 150)) == (80 * number + 20, 0, 0)


def test_bytes_are_bounded(place: Path, run: Run) -> None:
    huge = place / "photos" / "huge.png"
    huge.write_bytes(png())
    with huge.open("ab") as stream:
        stream.truncate(6 * 2**30)
    with tarfile.open(place / "x.tar", "w") as archive:
        facts = tarfile.TarInfo("declared.png")
        facts.size = 600
        archive.addfile(facts, io.BytesIO(bytes(600)))
        archive.addfile(_sized("a.png", png()), io.BytesIO(png()))
    with zipfile.ZipFile(place / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("bomb.png", png() + bytes(2**20))
    with pytest.raises(ImageError, match=r"huge.png: has more than 1,074 MB; check the file, or raise max_bytes$"):
        load_image(huge)
    code, _, err = run("batch", "photos", "x.tar", "bomb.zip", *MODEL, "--max-bytes", "500", "-o", "out")
    assert code == 1
    lines = [line for line in err.splitlines() if "error" in line]
    assert len(lines) == 3
    assert all("has more than 500 bytes; check the file, or raise --max-bytes" in line for line in lines)
    assert (place / "out" / "good.rollout.png").exists()
    assert (place / "out" / "x" / "a.rollout.png").exists()


def _sized(name: str, content: bytes) -> tarfile.TarInfo:
    facts = tarfile.TarInfo(name)
    facts.size = len(content)
    return facts


def test_members_of_zip_files_that_cannot_be_read_are_one_image_each(place: Path, run: Run) -> None:
    with zipfile.ZipFile(place / "x.zip", "w") as packed:
        for name, color in (("a.png", "red"), ("crc.png", "blue"), ("secret.png", "lime"), ("b.png", "white")):
            packed.writestr(name, png(color))
        link = zipfile.ZipInfo("link.png")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        packed.writestr(link, "/etc/passwd")
    data = bytearray((place / "x.zip").read_bytes())
    at = data.index(b"crc.png") + len("crc.png") + 20
    data[at] ^= 0xFF
    for mark in (b"PK\x03\x04", b"PK\x01\x02"):
        start = 0
        while (start := data.find(mark, start)) >= 0:
            if b"secret.png" in data[start : start + 60]:
                data[start + (6 if mark[2] == 3 else 8)] |= 1
            start += 4
    (place / "x.zip").write_bytes(bytes(data))
    code, _, err = run("batch", "x.zip", *MODEL, "-o", "out")
    assert code == 1
    for text in ("crc.png: cannot be read", "secret.png: is encrypted", "link.png: is a link"):
        assert text in err
    assert sorted(path.name for path in (place / "out").rglob("*.png")) == ["a.rollout.png", "b.rollout.png"]


def test_bad_inputs_beside_a_good_one_are_one_input_each(place: Path, run: Run) -> None:
    os.mkfifo(place / "pipe")
    os.mkfifo(place / "pipe.txt")
    os.mkfifo(place / "pipe.tar")
    (place / "cut.tar").write_bytes(b"x" * 600)
    (place / "list.txt").write_text(
        f"zip://x::file:///etc/passwd\nzip://x::{place}/pipe\nfile://{place}/pipe\nftp://127.0.0.1:1/a.png\n\0.png\n" + "a" * 5000
    )
    (place / "list.csv").write_text("wrong\n1\n")
    inputs = [
        "missing.png",
        "pipe",
        "pipe.txt",
        "pipe.tar",
        "cut.tar",
        "list.txt",
        "list.csv",
        "nothing*",
        "zip://x::missing.zip",
    ]
    code, _, err = run("batch", *inputs, "photos/good.png", *MODEL, "-o", "out")
    lines = [line for line in err.splitlines() if "error" in line]
    assert code == 1, err
    assert len(lines) == len(inputs) - 1 + 6, err
    assert "internal error" not in err
    journal = map(json.loads, (place / "out" / "journal.jsonl").read_text().splitlines())
    assert sum(bool(entry[5]) for entry in journal if isinstance(entry, list)) == len(lines)
    assert (place / "out" / "good.rollout.png").exists()


def _journal(place: Path) -> Path:
    return place / "out" / "journal.jsonl"


def _swap(how: str, place: Path) -> None:
    journal, spare = _journal(place), place / "out" / ".journal.jsonl.files"
    if how.startswith("the journal"):
        journal.rename(place / "kept")
    if how == "the journal is a pipe":
        os.mkfifo(journal)
    elif how == "the journal is a link":
        journal.symlink_to(place / "kept")
    elif how == "the journal is a folder":
        journal.mkdir()
    elif how == "another journal is a pipe":
        os.mkfifo(place / "out" / "journal_x.jsonl")
    elif how == "spare files are a link":
        spare.symlink_to(place / "photos")
    else:
        spare.touch()


SWAPS = (
    "the journal is a pipe",
    "the journal is a link",
    "the journal is a folder",
    "another journal is a pipe",
    "spare files are a link",
    "spare files are a file",
)


@pytest.mark.parametrize("how", SWAPS)
def test_special_files_in_place_of_a_journal_are_refused(how: str, place: Path, run: Run) -> None:
    assert run("batch", "photos/good.png", *MODEL, "-o", "out")[0] == 0
    _swap(how, place)
    before = {path: path.lstat().st_mode for path in place.rglob("*")}
    code, _, err = run("batch", "photos", *MODEL, "-o", "out")
    assert code == 2
    assert "remove it, or choose another folder" in err
    assert {path: path.lstat().st_mode for path in place.rglob("*")} == before


def test_links_in_an_output_folder_are_not_followed(place: Path, run: Run) -> None:
    (place / "photos" / "sub").mkdir()
    (place / "photos" / "sub" / "in.png").write_bytes(png("lime"))
    victims = place / "victims"
    victims.mkdir()
    (victims / "mine.png").write_bytes(b"mine")
    (place / "out").mkdir()
    (place / "out" / "sub").symlink_to(victims)
    (place / "out" / "good.rollout.png").symlink_to(victims / "mine.png")
    code, _, err = run("batch", "photos", *MODEL, "-o", "out")
    assert code != 0
    assert [path.name for path in victims.iterdir()] == ["mine.png"]
    assert (victims / "mine.png").read_bytes() == b"mine"
    (place / "out" / "good.rollout.png").unlink()
    code, _, err = run("batch", "photos", *MODEL, "-o", "out")
    assert code == 1
    assert "out/sub: is a link, which is not replaced; remove it" in err
    assert (place / "out" / "good.rollout.png").exists()
    assert [path.name for path in victims.iterdir()] == ["mine.png"]


@pytest.mark.parametrize("kind", ["device", "pipe", "socket"])
def test_special_files_are_no_outputs(kind: str, place: Path, run: Run) -> None:
    import socket

    path = Path("special.png")
    if kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 7))
        except PermissionError:
            pytest.skip("this user cannot make devices")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    mode = path.lstat().st_mode
    with pytest.raises(OutputError, match=f"is a {kind}, not a regular file; choose another name"):
        check_output(path, overwrite=True)
    with pytest.raises(OutputError, match=f"is a {kind}, not a regular file"):
        write_whole(path, b"x")
    code, _, err = run("overlay", "photos/good.png", *MODEL, "-o", path, "--overwrite")
    assert code == 2
    assert f"is a {kind}" in err
    assert path.lstat().st_mode == mode
    assert [file.name for file in Path().iterdir() if file.name.startswith(".visattn")] == []


def test_states_of_a_space_are_not_kept_through_a_link(place: Path, run: Run) -> None:
    (place / "elsewhere").mkdir()
    (place / "space.npz.states").symlink_to(place / "elsewhere")
    code, _, err = run("embed", "photos", "--model", "own.py:vit", "-o", "space.npz")
    assert code == 2
    assert "space.npz.states: must be a folder, got a link" in err
    assert not list((place / "elsewhere").iterdir())


def test_a_header_of_negative_size_ends_the_reading_of_a_tar_file(place: Path) -> None:
    with tarfile.open(place / "x.tar", "w") as archive:
        for name in ("a.png", "b.png"):
            archive.addfile(_sized(name, png()), io.BytesIO(png()))
    data = bytearray((place / "x.tar").read_bytes())
    start = data.index(b"b.png")
    data[start + 124 : start + 136] = b"\xff" * 10 + b"\xfe\x00"  # -512, as tar files state large sizes
    total = sum(data[start : start + 148]) + 8 * 32 + sum(data[start + 156 : start + 512])
    data[start + 148 : start + 156] = b"%06o\0 " % total
    (place / "x.tar").write_bytes(bytes(data))
    good, end = items_of([place / "x.tar"])
    assert good.photo().getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(ImageError, match=r"x.tar: is damaged, or cut off, after 1 images"):
        end.photo()


def test_chains_of_hard_links_are_followed(place: Path) -> None:
    with tarfile.open(place / "x.tar", "w") as archive:
        archive.addfile(_sized("a.png", png("lime")), io.BytesIO(png("lime")))
        for name, target in (("b.png", "a.png"), ("c.png", "b.png"), ("self.png", "self.png"), ("d.png", "none.png")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.LNKTYPE, target
            archive.addfile(link)
    items = items_of([place / "x.tar"])
    assert [item.photo().getpixel((0, 0)) for item in items[:3]] == [(0, 255, 0)] * 3
    for item in items[3:]:
        with pytest.raises(ImageError, match="is a link to a member that is not there"):
            item.photo()


def test_a_line_of_a_list_may_name_a_member_or_an_odd_file(place: Path) -> None:
    (place / "photo:x.png").write_bytes(png("lime"))
    with zipfile.ZipFile(place / "x.zip", "w") as packed:
        packed.writestr("sub/a.png", png("blue"))
    with tarfile.open(place / "x.tar", "w") as archive:
        archive.addfile(_sized("a.png", png("white")), io.BytesIO(png("white")))
    lines = ["./photo:x.png", f"zip://sub/a.png::{place}/x.zip", f"tar://a.png::file://{place}/x.tar", "./photo:chelsea"]
    (place / "list.txt").write_text("\n".join(lines))
    *images, missing = items_of(["list.txt"])
    assert [item.photo().getpixel((0, 0)) for item in images] == [(0, 255, 0), (0, 0, 255), (255, 255, 255)]
    with pytest.raises(ImageError, match="photo:chelsea: no such file"):
        missing.photo()


def test_every_save_of_python_replaces_by_default_and_can_refuse() -> None:
    from visattn.batch.films import explain_video
    from visattn.core.pipeline.explanation import Explanation
    from visattn.embedding import save_html, save_npz
    from visattn.studies import Study

    functions = (Explanation.save, Explanation.save_map, Study.save, Study.save_html, save_html, save_npz, explain_video)
    assert {inspect.signature(function).parameters["overwrite"].default for function in functions} == {True}


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_archives_and_maps_that_are_unpacked_without_a_bound_are_refused(method: int, place: Path) -> None:
    with zipfile.ZipFile(place / "x.zip", "w", method) as packed:
        packed.writestr("a.png", png() + bytes(2**20))
    with pytest.raises(ImageError, match=r"x.zip/a.png: is packed by a method that is not read"):
        items_of([place / "x.zip"])
    with zipfile.ZipFile(place / "x.npz", "w", method) as packed:
        packed.writestr("facts.npy", bytes(2**20))
        packed.writestr("values.npy", bytes(2**20))
    with pytest.raises(MapError, match="is packed by a method that numpy does not write"):
        load_map(place / "x.npz")


@pytest.mark.parametrize("name", ["journal.old.jsonl/a.png", ".journal.jsonl.files/a.png"])
def test_names_of_the_journal_are_no_names_of_images(name: str, place: Path, run: Run) -> None:
    with zipfile.ZipFile(place / f"{Path(name).parts[0]}.zip", "w") as packed:
        packed.writestr("a.png", png())
    (place / "more").mkdir()
    (place / "more" / "good.png").write_bytes(png())
    inputs = [f"{Path(name).parts[0]}.zip", "more"]
    if not name.startswith("."):
        (place / "more" / Path(name).parent).mkdir()
        (place / "more" / name).write_bytes(png())
    for kept in (0, 1):
        code, _, err = run("batch", *inputs, *MODEL, "--batch-size", "1", "-o", "out")
        assert code == 1, err
        assert f"the name {Path(name).parts[0]} is kept for journals of runs. Rename that folder or archive." in err
        assert ("1 from an earlier run" in err) == bool(kept)
    assert sorted(path.name for path in (place / "out").iterdir()) == ["good.rollout.png", "journal.jsonl"]


@pytest.mark.parametrize(
    "line", ["zip://a**b.png::x.zip", "http://[abc/x.jpg", "http://127.0.0.1:1/x/.", "http://127.0.0.1:1/a%00b.png"]
)
def test_a_line_that_cannot_be_parsed_leaves_the_others(line: str, place: Path, run: Run) -> None:
    (place / "list.txt").write_text(f"{line}\nphotos/good.png\n")
    code, _, err = run("batch", "list.txt", *MODEL, "-o", "out")
    assert code == 1, err
    assert len([text for text in err.splitlines() if "error" in text]) == 1
    assert (place / "out" / "good.rollout.png").exists()
    code, _, err = run("batch", line, "photos/good.png", *MODEL, "-o", "alone")
    assert code == 1, err


def test_a_stream_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trickle(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            clock[0] += 2.0
            return self.read(1)

    clock = [0.0]
    monkeypatch.setattr("visattn.core.images.loading.time.monotonic", lambda: clock[0])
    with pytest.raises(ImageError, match="x: answers too slowly, below 1 kB a second; try again, or download it"):
        bounded(Trickle(bytes(10**6)), 2**20, "x")
    assert clock[0] < 30
    assert len(bounded(io.BytesIO(bytes(10**6)), 2**20, "x")) == 10**6


def test_lines_that_name_members_read_the_directory_of_an_archive_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(place / "x.tar", "w") as archive:
        for number in range(20):
            archive.addfile(_sized(f"{number}.png", png()), io.BytesIO(png()))
    (place / "list.txt").write_text("".join(f"tar://{number}.png::x.tar\n" for number in range(20)))
    items, opened, whole = items_of(["list.txt"]), [0], archives._of_tar
    monkeypatch.setattr(archives, "_of_tar", lambda *given: opened.__setitem__(0, opened[0] + 1) or whole(*given))
    assert {item.photo().getpixel((0, 0)) for item in items} == {(255, 0, 0)}
    assert opened == [1]


def test_names_of_dots_stay_names(place: Path) -> None:
    for name in ("..jpg", "...png", "a..png"):
        (place / name).write_bytes(png())
    names = [item.name for item in items_of([place / "..jpg", place / "...png", place / "a..png"])]
    assert names == ["..jpg", "...png", "a."]
