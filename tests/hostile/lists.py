"""Lists of images, and operands as a shell expands them, with lines of every kind beside those of intact photos."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.hostile.driver import Case
from tests.hostile.photos import RUN, SECRET, Expected, canary, options, photo, place_of

GOOD = {"g1.png": 1, "sub/g2.png": 2, "WORK/g3.png": 3, "./photo:g4.png": 4, "x.py:1.jpg": 5}
CODE = "{{{{ cycler.__init__.__globals__.os.system('touch {place}') }}}}"


class Line(NamedTuple):
    """Line of a list.

    Attributes:
        text: The line; WORK becomes the folder of the command, OUTSIDE another one.
        fails: Whether its image fails for certain.
        may: Numbers of photos that it may give; -1 for a shipped photo.
    """

    text: str
    fails: bool = True
    may: tuple[int, ...] = ()


def _lines(*texts: str) -> tuple[Line, ...]:
    return tuple(Line(text) for text in texts)


LINES = (
    Line("photo:g4.png", False, (4,)),  # a name that exists as a file is that file
    Line("g1.png/", False, (1,)),  # a slash behind a file is left out
    *_lines("missing.png", "sub", ".", "..", "/", "/etc", "~/g1.png", "OUTSIDE", "OUTSIDE/victim", "own.py", "g1.png/x.png"),
    *_lines("x.py:f", "./x.py:f", "WORK/x.py:f", "x.py:", "x.py:f.png", "own.py:make", "x.py::f", "sub/y.py:f"),
    *_lines(
        "pipe",
        "WORK/pipe",
        "/dev/zero",
        "/dev/stdin",
        "/dev/full",
        "/dev/random",
        "/proc/self/mem",
        "/proc/self/fd/0",
        "dangling.png",
    ),
    *_lines(
        "a\0b.png", "\0", "\x1b]0;x\a.png", "\x7f", "a\u2028b.png", "\u202egnp.png", "x" * 100_000, "d/" * 50_000, "é" * 30_000
    ),
    *_lines(
        "file:///dev/zero",
        "file:///dev/random",
        "file://WORK/pipe",
        "file:///etc/passwd",
        "file://",
        "file:///",
        "file://WORK/sub",
    ),
    *_lines(
        "zip://x::file:///etc/passwd",
        "zip://a.png::file:///dev/zero",
        "zip://a.png::file://WORK/pipe",
        "zip://a.png::zip://b::missing.zip",
    ),
    *_lines(
        "tar://a.png::file:///dev/zero",
        "tar://a.png::file://WORK/pipe",
        "tar://a::http://127.0.0.1:1/x.tar",
        "libarchive://a::g1.png",
    ),
    *_lines(
        "http://127.0.0.1:1/a.png",
        "https://127.0.0.1:1/a.png",
        "ftp://127.0.0.1:1/a.png",
        "http://",
        "http:///",
        "http://[::1",
        "HTTP:/127.0.0.1:1/x",
    ),
    *_lines(
        "http://127.0.0.1:99999/a",
        "http://\x1b@x/",
        "sftp://127.0.0.1:1/a.png",
        "smb://127.0.0.1/a/b.png",
        "webhdfs://127.0.0.1:1/a.png",
    ),
    *_lines(
        "unknown://a.png",
        "://",
        "://a.png",
        "a://",
        "s3://bucket/a.png",
        "gs://bucket/a.png",
        "hf://datasets/a/b/c.png",
        "git://a.png",
    ),
    *_lines(
        "reference://g0.png::file://WORK/refs.json",
        "reference://a.png::file://WORK/refs.json",
        "reference://b.png::file://WORK/refs.json",
    ),
    *_lines(
        "reference://::file://WORK/refs.json",
        "reference://a.png::WORK/refs.json",
        "simplecache::reference://g0.png::file://WORK/refs.json",
    ),
    *_lines(
        "simplecache::file:///dev/zero",
        "filecache::file:///etc/passwd",
        "simplecache::http://127.0.0.1:1/a.png",
        "blockcache::file:///etc/passwd",
    ),
    *_lines(
        "memory://a.png", "memory://", "github://a:b@main/x.png", "github://x", "data:image/png;base64,xxxx", "data:,x", "data:"
    ),
    *_lines(
        "dir::file://WORK/sub",
        "async_wrapper://x",
        "jupyter://127.0.0.1:1/x",
        "dask://x",
        "root://x",
        "pyscript://x",
        "ws://127.0.0.1:1/x",
    ),
    *_lines(
        "photo:",
        "photo:nothing",
        "photo:../x",
        "photo:/etc/passwd",
        "scene:",
        "scene:-1",
        "scene:x",
        "scene:1e3",
        "scene:²",
    ),
    *_lines(
        "list.txt",
        "list.csv",
        "other.txt",
        "WORK/list.txt",
        "*.nothing",
        "[",
        "sub/**",
        "?",
        "-rf",
        "--help",
        "'",
        '"',
        "a,b",
        "%s",
        "{0}",
    ),
    *_lines(
        "missing.tar",
        "s3://",
        "hf://",
        "zip://",
        "zip://::",
        "::",
        "zip::",
        "simplecache::",
        "simplecache::simplecache::g1.png",
        "x" * 300 + ".png",
    ),
    Line("*.png", False, (1, 3)),
    Line("sub/*.png", False, (2,)),
    Line("photo:chelsea", False, (-1,)),
    Line("scene:3", False, (-1,)),
    Line("file://WORK/g1.png", False, (1,)),
    Line("local://WORK/g1.png", False, (1,)),
    Line("simplecache::file://WORK/g1.png", False, (1,)),
    Line("filecache::file://WORK/g1.png", False, (1,)),
    Line("blockcache::file://WORK/g1.png", False, (1,)),
    Line("dir://g1.png::file://WORK", False, (1,)),
    Line("data:image/png;base64," + base64.b64encode(photo(6)).decode(), False, (6,)),
    Line("memory://g1.png", True),
    Line("linked.png", False, (SECRET,)),
    Line("OUTSIDE/secret.png", False, (SECRET,)),
    Line("x.py:f", True),
    Line("scene:99999999999999999999", True),
)


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield `count` cases."""
    for number in range(count):
        dice = random.Random(f"{seed} list {number}")
        kind = dice.choice([_text, _text, _text, _table, _table, _damaged, _damaged_table, _operands])
        expected = Expected(may={0})
        write = kind(dice, expected)
        beside = kind in (_damaged, _damaged_table) or dice.random() < 0.5
        if beside:
            expected.must["plain.png"] = 0
        words = options(dice)

        def prepare(folder: Path, write: Write = write, words: list[str] = words, beside: bool = beside) -> list[str]:
            place_of(folder)
            _folder(folder)
            return [*RUN, *words, *write(folder), *(["plain.png"] if beside else [])]

        yield Case(
            f"list {seed}.{number} {kind.__name__.strip('_')}", prepare, ("out",), prints=True, check=expected.check, clear=True
        )


Write = Callable[[Path], list[str]]


def _folder(folder: Path) -> None:
    """Write photos, and what lies beside them: code that must not run, pipes, links, descriptions of remote files."""
    (folder / "sub").mkdir()
    for name, number in {**GOOD, "plain.png": 0}.items():
        (folder / name.replace("WORK/", "")).write_bytes(photo(number))
    for name in ("x.py", "sub/y.py"):
        (folder / name).write_text(canary(folder, "module") + "def f():\n    " + canary(folder, "function") + "    return []\n")
    os.mkfifo(folder / "pipe")
    (folder / "dangling.png").symlink_to(folder / "nothing")
    (folder / "linked.png").symlink_to(folder.parent / "outside" / "secret.png")
    (folder / "other.txt").write_text("list.txt\nother.txt\n")
    code = CODE.format(place=folder.parent / "canaries" / "template")
    dimensions = {"i": {"stop": 2}}
    generated = [{"key": "g{{i}}.png", "url": code, "offset": "{{i}}", "length": "1", "dimensions": dimensions}]
    refs = {"a.png": [code, 0, 9], "b.png": code, "c.png": ["{{u}}", 0, 9]}
    (folder / "refs.json").write_text(
        json.dumps({"version": 1, "templates": {"u": code, "f": code}, "gen": generated, "refs": refs})
    )


def _drawn(dice: random.Random, expected: Expected) -> list[str]:
    """Return lines of intact photos and of others, in any order."""
    good = dice.sample(list(GOOD), dice.randint(1, 3))
    odd = dice.choices(LINES, k=dice.choice([1, 1, 2, 3]))
    expected.must |= {name.replace("WORK/", "").removeprefix("./"): GOOD[name] for name in good}
    expected.fails = expected.fails or any(line.fails for line in odd)
    expected.may |= {number for line in odd for number in line.may}
    lines = [*good, *(line.text for line in odd)]
    dice.shuffle(lines)
    return lines


def _here(text: str, folder: Path) -> bytes:
    text = text.replace("WORK", str(folder)).replace("OUTSIDE", str(folder.parent / "outside"))
    return text.encode("utf-8", "surrogateescape")


def _text(dice: random.Random, expected: Expected) -> Write:
    lines, end = _drawn(dice, expected), dice.choice(["\n", "\n", "\r\n", "\n\n", " \n"])
    begin = dice.choice([b"", b"", b"", b"\xef\xbb\xbf", b"\n\n"])

    def write(folder: Path) -> list[str]:
        (folder / "list.txt").write_bytes(begin + _here(end.join(lines) + dice.choice(["", end]), folder))
        return ["list.txt"]

    return write


def _table(dice: random.Random, expected: Expected) -> Write:
    lines, column = _drawn(dice, expected), dice.choice(["image", "path", "file", "filename"])
    begin = dice.choice([b"", b"", b"\xef\xbb\xbf"])
    others = dice.choice([[], ["label"], ["label", "x\x1b"], [""], ["label"] * 3])

    def write(folder: Path) -> list[str]:
        stream = io.StringIO()
        writer = csv.writer(stream, quoting=dice.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
        writer.writerows([[column, *others], *([line, *("1" for _ in others)] for line in lines)])
        (folder / "list.csv").write_bytes(begin + _here(stream.getvalue(), folder))
        return ["list.csv"]

    return write


def _loosened(expected: Expected) -> None:
    """Allow that a damaged list is refused, or read as far as it goes."""
    expected.may |= {*expected.must.values(), *(number for line in LINES for number in line.may)}
    expected.must, expected.fails = {}, False


def _damaged(dice: random.Random, expected: Expected) -> Write:
    """Write a list that is no text, or of another encoding."""
    lines = _drawn(dice, expected)
    _loosened(expected)
    make: Callable[[bytes], bytes] = dice.choice(
        [
            lambda text: text.decode(errors="replace").encode("utf-16"),
            lambda text: text.decode(errors="replace").encode("utf-32-be"),
            lambda text: text + "é.png\n".encode("latin-1"),
            lambda text: photo(1),
            lambda text: b"",
            lambda text: b"\n" * 5000,
            lambda text: b"\0" * 5000,
            lambda text: dice.randbytes(3000),
            lambda text: b"x" * 3_000_000,
            lambda text: b"\xed\xa0\x80.png\n" + text,
            lambda text: text.replace(b"\n", b"\r"),
            lambda text: text.replace(b"\n", b"\x0b"),
            lambda text: text.replace(b"\n", "\u2028".encode()),
        ]
    )

    def write(folder: Path) -> list[str]:
        (folder / "list.txt").write_bytes(make(_here("\n".join(lines) + "\n", folder)))
        return ["list.txt"]

    return write


def _damaged_table(dice: random.Random, expected: Expected) -> Write:
    lines = _drawn(dice, expected)
    _loosened(expected)
    wide = ",".join(["x"] * 1_000_000)
    make: Callable[[bytes], bytes] = dice.choice(
        [
            lambda text: b'image\n"' + text,
            lambda text: b"image\n" + text + b'"g1.png\n',
            lambda text: b'im"age\n' + text,
            lambda text: b"image\n" + text.replace(b"\n", b"\0\n"),
            lambda text: b"nothing\n" + text,
            lambda text: text,
            lambda text: b"image," + wide.encode() + b"\n" + text,
            lambda text: b"image\n" + text + b"g1.png," + wide.encode() + b"\n",
            lambda text: ("image\n" + text.decode(errors="replace")).encode("utf-16"),
            lambda text: b"image,image\n" + text,
            lambda text: b"image;label\n" + text,
            lambda text: b"\0image\n" + text,
            lambda text: b"image\n" + b'"' + b"x" * 200_000 + b'"\n' + text,
            lambda text: b"",
            lambda text: b"image\n",
            lambda text: b"image\r" + text.replace(b"\n", b"\r"),
            lambda text: b"IMAGE\n" + text,
        ]
    )

    def write(folder: Path) -> list[str]:
        (folder / "list.csv").write_bytes(make(_here("\n".join(lines) + "\n", folder)))
        return ["list.csv"]

    return write


def _operands(dice: random.Random, expected: Expected) -> Write:
    """Return operands as a shell expands a pattern, in a folder with code that nobody asked to run, or one that the command expands."""
    kind = dice.randrange(5)
    if kind == 0:
        expected.unnamed = [7, 8]
        return lambda folder: sorted(str(file.relative_to(folder)) for file in _beside_code(folder, ("x.py:1.jpg", "x.py:f")))
    if kind == 1:
        expected.unnamed = [7]
        return lambda folder: (
            [["in/*"], ["in/**"], ["in"], ["in/x.py:*"], ["./in/?.py:1.jpg"]][dice.randrange(5)]
            if _beside_code(folder, ("x.py:1.jpg",))
            else []
        )
    if kind == 2:
        name = dice.choice(
            [
                "*.png",
                "[a].png",
                "a?.png",
                "photo:a.png",
                "scene:1",
                "zip:a.png",
                "-a.png",
                "a::b.png",
                "file:a.png",
                "http:a.png",
            ]
        )
        expected.unnamed = [7]
        return lambda folder: [str(file.relative_to(folder)) for file in _beside_code(folder, (name,))]
    if kind == 3:
        expected.may |= {7, 8}
        name = dice.choice(
            ["in/x.py", "in/x.py:1.jpg:f", "in/x.py:2.jpg.png", "in/missing", "in/\0.png", "in/" + "x" * 300, "in/pipe", ""]
        )
        expected.fails = True
        expected.must["x.py:1.jpg"] = 7
        return lambda folder: [name, *(str(file.relative_to(folder)) for file in _beside_code(folder, ("x.py:1.jpg",)))]
    line = dice.choice(
        [
            line
            for line in LINES
            if "\0" not in line.text
            and "x.py:" not in line.text
            and "y.py:" not in line.text
            and "own.py:" not in line.text
            and not line.text.startswith("-")
            and len(line.text) < 5000
        ]
    )
    if line.text.startswith((".", "/", "sub", "OUTSIDE", "?", "*", "other", "list")) or line.text in ("~/g1.png",):
        return _text(dice, expected)
    expected.must["g1.png"] = 1
    expected.fails = line.fails
    expected.may |= {*line.may, 1}
    return lambda folder: [os.fsdecode(_here(line.text, folder)), "g1.png"]


def _beside_code(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """Write photos of these names, and code beside them; return the photos."""
    inner = folder / "in"
    inner.mkdir()
    (inner / "x.py").write_text(canary(folder, "module") + "def f():\n    " + canary(folder, "function") + "    return []\n")
    files = [inner / name for name in names]
    for number, file in enumerate(files, start=7):
        file.write_bytes(photo(number))
    return files
