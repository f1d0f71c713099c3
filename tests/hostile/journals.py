"""Output folders of a finished run of `visattn batch`, whose journal and files were changed by others, and the same command again."""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile.driver import Case
from tests.hostile.folders import VALUES, _text
from tests.hostile.photos import OUT, RUN, Expected, photo, place_of

PHOTOS = {"p1.png": 1, "p2.png": 2, "sub/p3.png": 3}
JOURNAL, SPARE = "journal.jsonl", ".journal.jsonl.files"
FIELDS = ("number", "image", "name", "sha256", "outputs", "error", "warnings", "sample")
OUTPUTS: tuple[Any, ...] = (
    ["../outside/victim"],
    ["OUTSIDE/victim"],
    ["/etc/passwd"],
    ["../../x"],
    ["../photos/p2.png"],
    ["../own.py"],
    ["sub/../../outside/victim"],
    ["link/victim"],
    ["victim"],
    ["."],
    [".."],
    [""],
    ["/"],
    ["sub"],
    [JOURNAL],
    ["p2.overlay.png"],
    ["p2.overlay.png", "p2.overlay.png"],
    ["n" * 5000],
    ["a\0b"],
    ["\ud800"],
    [3],
    [None],
    [["p1.overlay.png"]],
    "p1.overlay.png",
    {"p1.overlay.png": 1},
    3,
    None,
    [],
    ["p1.overlay.png"] * 50_000,
    ["~/x"],
    ["pipe"],
    ["/dev/zero"],
)
LINES = (
    b"",
    b"{}",
    b"null",
    b"3",
    b"[]",
    b"[0]",
    b"[" * 100_000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 5000,
    b"NaN",
    b"[NaN, Infinity, -Infinity, 1e999, 0, 0, 0]",
    b'{"number": 0, "number": 1}',
    b"\xff\xfe\0\0",
    b"\0" * 4000,
    b'"' + b"x" * (4 << 20) + b'"',
    b"\xef\xbb\xbf[0]",
    b'[0, "\\ud800", "\\ud800", "", ["\\ud800"], "", []]',
    b"[0, 1, 2, 3, 4, 5, 6]",
    b"[[], [], [], [], [], [], []]",
    b"\x1b]0;x\a",
)


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield `count` cases."""
    for number in range(count):
        dice = random.Random(f"{seed} journal {number}")
        words = tuple(dice.choice([[], [], [], ["--stats"], ["--maps"], ["--maps", "--stats"], ["--pack-maps"], ["--studies"]]))
        change = dice.choice(_CHANGES)
        expected = Expected(dict(PHOTOS), images=len(PHOTOS))
        edit = change(dice, expected)
        after = dice.choice([_same, _same, _same, _other_photo, _damaged_photo, _gone_picture])
        name = f"journal {seed}.{number} {change.__name__.strip('_')} {after.__name__.strip('_')} {' '.join(words)}"
        after_edit = after(expected)
        expected.passes = not expected.fails and not expected.ends
        expected.may |= set(expected.must.values())

        def prepare(folder: Path, words: tuple[str, ...] = words, edit: Edit = edit, after_edit: Edit = after_edit) -> list[str]:
            place_of(folder)
            done = finished(words)
            shutil.copytree(done / "photos", folder / "photos")
            shutil.copytree(done / OUT, folder / OUT)
            edit(folder)
            after_edit(folder)
            return [*RUN, *words, "photos", "-q"]

        yield Case(name, prepare, (OUT,), prints=True, check=expected.check, clear=True)


Edit = Callable[[Path], None]


@functools.cache
def finished(words: tuple[str, ...]) -> Path:
    """Return a folder with photos, and what a run over them has written."""
    place, mine = Path(tempfile.mkdtemp(prefix="hostile-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(place) if os.getpid() == mine else None)  # not when a forked child exits
    work = place / "work"
    (work / "photos" / "sub").mkdir(parents=True)
    place_of(work)
    for name, number in PHOTOS.items():
        (work / "photos" / name).write_bytes(photo(number))
    subprocess.run(
        [sys.executable, "-m", "visattn", *RUN, *words, "photos", "-q"],
        cwd=work,
        check=True,
        capture_output=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))),
        },
    )
    return work


# what else has changed before the command runs again


def _same(_expected: Expected) -> Edit:
    return lambda folder: None


def _other_photo(expected: Expected) -> Edit:
    """Let the first photo be another one now."""
    expected.must["p1.png"] = 4
    return lambda folder: _write(folder / "photos" / "p1.png", photo(4))


def _damaged_photo(expected: Expected) -> Edit:
    """Damage the first photo, so that it fails and its former files are removed."""
    del expected.must["p1.png"]
    expected.fails = True
    return lambda folder: _write(folder / "photos" / "p1.png", photo(1)[:40])


def _gone_picture(_expected: Expected) -> Edit:
    return lambda folder: (folder / OUT / "p1.overlay.png").unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


# changes of the journal


def _lines(folder: Path) -> list[bytes]:
    """Return the settings, the lines of images, and at the end those of files that were about to be written."""
    first, *lines = (folder / OUT / JOURNAL).read_bytes().splitlines(keepends=True)
    return [first, *sorted(lines, key=lambda line: not line.startswith(b"["))]


def _edited(edit: Callable[[list[bytes], Path], list[bytes]]) -> Edit:
    return lambda folder: _write(folder / OUT / JOURNAL, b"".join(edit(_lines(folder), folder)))


def _replaced(line: bytes, field: str, value: Any, folder: Path) -> bytes:
    """Replace a field of a line; OUTSIDE in a text becomes the folder outside."""
    entry = json.loads(line)
    entry[FIELDS.index(field)] = value
    text = _text(entry).replace("OUTSIDE", str(folder.parent / "outside"))
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _field(dice: random.Random, expected: Expected) -> Edit:
    field, value, which = dice.choice(FIELDS), dice.choice(VALUES), dice.randint(1, 3)
    # the files are then those of an image that is not given, or the model computes something else than the journal says
    expected.ends = (field == "image" and isinstance(value, str)) or field == "sample"
    return _edited(lambda lines, folder: [*lines[:which], _replaced(lines[which], field, value, folder), *lines[which + 1 :]])


def _outputs(dice: random.Random, _expected: Expected) -> Edit:
    value, which = dice.choice(OUTPUTS), dice.choice([1, 1, 1, 2, 3])
    if isinstance(value, list) and all(isinstance(name, str) for name in value) and dice.random() < 0.7:
        value = dict.fromkeys(value, dice.choice(["", "0" * 64]))
    return _edited(lambda lines, folder: [*lines[:which], _replaced(lines[which], "outputs", value, folder), *lines[which + 1 :]])


def _names(dice: random.Random, expected: Expected) -> Edit:
    field = dice.choice(["image", "name"])
    expected.ends = field == "image"
    value = dice.choice(
        ["../outside/victim", "OUTSIDE/victim", "../x", "p2", "sub", "", "\0", "n" * 5000, ".", "photos/p2.png", "/etc/passwd"]
    )
    return _edited(lambda lines, folder: [lines[0], _replaced(lines[1], field, value, folder), *lines[2:]])


def _of_another(dice: random.Random, expected: Expected) -> Edit:
    """Let the line of one image state files, digest or number of another."""
    field = dice.choice(["number", "sha256", "outputs", "name", "image"])
    expected.ends = field == "image"

    def edit(lines: list[bytes], folder: Path) -> list[bytes]:
        other = json.loads(lines[2])[FIELDS.index(field)]
        return [lines[0], _replaced(lines[1], field, other, folder), *lines[2:]]

    return _edited(edit)


def _whole_line(dice: random.Random, _expected: Expected) -> Edit:
    line, which = dice.choice(LINES), dice.randint(1, 4)
    return _edited(lambda lines, _: [*lines[:which], line + b"\n", *lines[which + dice.randint(0, 1) :]])


def _number_of_fields(dice: random.Random, _expected: Expected) -> Edit:
    more = dice.choice([b'"x"', b"null", b"[]", b'{"x": 1}'])
    cut = dice.random() < 0.5
    which = dice.randint(1, 3)

    def edit(lines: list[bytes], _: Path) -> list[bytes]:
        entry = json.loads(lines[which])
        line = json.dumps(entry[: dice.randint(1, 6)]).encode() if cut else json.dumps(entry).encode()[:-1] + b", " + more + b"]"
        return [*lines[:which], line + b"\n", *lines[which + 1 :]]

    return _edited(edit)


def _end(dice: random.Random, _expected: Expected) -> Edit:
    tail = dice.choice([b"[3", b"\xff", b'[0, "photos/p1.png"', b"x" * 100_000, b"\n\n\n", b"\r\n", b" ", b"\0" * 3000])
    cut = dice.choice([0, 0, 1, 2, 30])

    def edit(lines: list[bytes], _: Path) -> list[bytes]:
        whole = b"".join(lines)
        return [whole[: len(whole) - cut], tail if cut == 0 or dice.random() < 0.5 else b""]

    return _edited(edit)


def _flips(dice: random.Random, _expected: Expected) -> Edit:
    """Flip bits in the lines of images, behind the name of the image: its files would else be those of an image that is not given."""
    key, which = dice.randrange(2**32), dice.randint(1, 3)

    def edit(lines: list[bytes], _: Path) -> list[bytes]:
        own, line = random.Random(key), bytearray(lines[which])
        start = line.index(b'", "') + 1
        for _flip in range(own.choice([1, 2, 10])):
            line[own.randrange(start, len(line) - 1)] ^= 1 << own.randrange(8)
        return [*lines[:which], bytes(line), *lines[which + 1 :]]

    return _edited(edit)


def _first_line(dice: random.Random, expected: Expected) -> Edit:
    expected.ends = True
    kind = dice.randrange(4)
    value, line = dice.choice(VALUES), dice.choice(LINES)

    def edit(lines: list[bytes], _: Path) -> list[bytes]:
        first = json.loads(lines[0])
        if kind == 0:
            return [line + b"\n", *lines[1:]]
        if kind == 1:
            return lines[1:]
        holder = first if kind == 2 else first["settings"]
        holder[dice.choice(sorted(holder))] = value
        return [_text(first).encode("utf-8", "surrogatepass") + b"\n", *lines[1:]]

    return _edited(edit)


def _many_lines(dice: random.Random, expected: Expected) -> Edit:
    expected.ends = True
    number = dice.choice([3, 10**6, -1, 2**70])
    line = json.dumps([number, "photos/x.png", "x", "", {"../outside/victim": ""}, "", [], []]).encode() + b"\n"
    return _edited(lambda lines, _: [*lines, line * dice.choice([1, 2000])])


# other things instead of files


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.bind(path.name)
    finally:
        os.chdir(here)


def _instead(kind: str, path: Path, outside: Path) -> None:
    """Put something else where a file or folder was."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        _socket(path)
    elif kind == "folder":
        (path / "inner").mkdir(parents=True)
        (path / "inner" / "mine").write_bytes(b"mine\n")
    elif kind == "file":
        path.write_bytes(b"mine\n")
    elif kind == "hard link":
        os.link(outside / "victim", path)
    else:
        targets = {"link": outside / "victim", "dangling": outside / "new", "into": outside, "zero": Path("/dev/zero")}
        path.symlink_to(targets.get(kind, path.name))


_KINDS = ("pipe", "socket", "folder", "file", "hard link", "link", "dangling", "into", "zero", "itself")


def _other_journal(dice: random.Random, expected: Expected) -> Edit:
    kind = dice.choice(_KINDS)
    expected.ends, expected.stays = True, (JOURNAL,)
    return lambda folder: _instead(kind, folder / OUT / JOURNAL, folder.parent / "outside")


def _linked_journal(dice: random.Random, expected: Expected) -> Edit:
    """Move the journal elsewhere, and link to it: what is outside of the folder must not be written."""
    expected.ends, expected.stays = True, (JOURNAL,)
    make: list[Callable[[Path, Path], None]] = [os.link, os.symlink]
    link = dice.choice(make)

    def edit(folder: Path) -> None:
        outside = folder.parent / "outside" / JOURNAL
        shutil.move(folder / OUT / JOURNAL, outside)
        link(outside, folder / OUT / JOURNAL)

    return edit


def _spare_folder(dice: random.Random, expected: Expected) -> Edit:
    kind = dice.choice(_KINDS)
    expected.ends, expected.stays = True, (SPARE, "mine")
    return lambda folder: _instead(kind, folder / OUT / SPARE, folder.parent / "outside")


def _further_journal(dice: random.Random, expected: Expected) -> Edit:
    """Put something beside the journal that is named like one of a part."""
    kind, name = (
        dice.choice(_KINDS),
        dice.choice(["journal_x.jsonl", "journal.0-of-2.jsonl", "journal.1-of-2.jsonl", "journal.jsonl.jsonl"]),
    )
    expected.ends, expected.stays = True, (name, "mine")
    return lambda folder: _instead(kind, folder / OUT / name, folder.parent / "outside")


def _other_picture(dice: random.Random, expected: Expected) -> Edit:
    """Replace a picture by something else: a file of the user in its place may be refused, a link is not followed."""
    kind = dice.choice(_KINDS)
    expected.ends = True
    if kind not in ("file", "hard link"):
        expected.may |= {2, -1}
        del expected.must["p2.png"]
        expected.fails = False
    if kind == "folder":
        expected.stays = ("mine", "p2.overlay.png")

    def edit(folder: Path) -> None:
        picture, outside = folder / OUT / "p2.overlay.png", folder.parent / "outside"
        _instead(kind, picture, outside)

    return edit


def _linked_picture(dice: random.Random, expected: Expected) -> Edit:
    """Move a picture elsewhere, and link to it; the photo is another one now. It is drawn, but not over a symbolic link."""
    make: list[Callable[[Path, Path], None]] = [os.link, os.symlink]
    link = dice.choice(make)
    expected.ends = True
    if link is os.link:
        expected.must["p2.png"] = 5
    else:
        del expected.must["p2.png"]
        expected.fails, expected.stays = True, ("p2.overlay.png",)
        expected.may |= {-1, 2}

    def edit(folder: Path) -> None:
        outside = folder.parent / "outside" / "p2.overlay.png"
        shutil.move(folder / OUT / "p2.overlay.png", outside)
        link(outside, folder / OUT / "p2.overlay.png")
        (folder / "photos" / "p2.png").write_bytes(photo(5))

    return edit


def _linked_folder(dice: random.Random, expected: Expected) -> Edit:
    """Replace a folder of pictures by a link to a folder elsewhere; a photo there is another one now."""
    expected.ends = True
    del expected.must["sub/p3.png"]
    expected.may |= {3, 5}
    kept = dice.random() < 0.5

    def edit(folder: Path) -> None:
        outside = folder.parent / "outside" / "sub"
        if kept:
            shutil.move(folder / OUT / "sub", outside)
        else:
            shutil.rmtree(folder / OUT / "sub")
            outside.mkdir()
        (folder / OUT / "sub").symlink_to(outside)
        (folder / "photos" / "sub" / "p3.png").write_bytes(photo(5))

    return edit


def _linked_output(dice: random.Random, expected: Expected) -> Edit:
    """Replace files of the statistics, or folders of maps, by links to files elsewhere."""
    expected.ends = True
    name = dice.choice(
        ["heads.csv", "layers.csv", "photos.csv", "stats.json", "maps", "p1.overlay.npz", "p1.attn", "heads.png", "layers.png"]
    )
    kind = dice.choice(["link", "dangling", "into", "pipe", "zero"])
    expected.stays = (name,)
    return lambda folder: _instead(kind, folder / OUT / name, folder.parent / "outside")


def _without_rights(dice: random.Random, expected: Expected) -> Edit:
    expected.ends = True
    name, mode = dice.choice(["", "sub", JOURNAL, "p1.overlay.png"]), dice.choice([0o500, 0o400, 0o000])
    expected.stays = (Path(name).name,) if name else ()
    return lambda folder: (folder / OUT / name).chmod(mode)


_CHANGES: tuple[Callable[[random.Random, Expected], Edit], ...] = (
    *(_field, _field, _field, _outputs, _outputs, _outputs, _outputs, _names, _of_another, _whole_line, _whole_line),
    *(_number_of_fields, _end, _flips, _first_line, _many_lines, _other_journal, _other_journal, _linked_journal),
    *(_spare_folder, _spare_folder, _further_journal, _further_journal, _other_picture, _linked_picture, _linked_folder),
    *(_linked_output, _without_rights),
)
