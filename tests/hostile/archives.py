"""Tar and zip files with members of every kind, given to `visattn batch` as files, in patterns, in lists and as addresses."""

from __future__ import annotations

import functools
import io
import os
import random
import shutil
import struct
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hostile.driver import Case
from tests.hostile.photos import RUN, Expected, canary, options, photo, place_of

BLOCK = 512
NAMES = (
    "/abs.png",
    "//abs.png",
    "../up.png",
    "../../../../../../../../tmp/up.png",
    "a/../../up.png",
    "..\\up.png",
    "C:\\up.png",
    "C:up.png",
    "\\\\host\\share\\up.png",
    "a\nb.png",
    "a\rb.png",
    "\x1b]0;x\a.png",
    "\x7f\x9b31m.png",
    "\u202egnp.exe.png",
    "a\u2066b.png",
    "\ufeffa.png",
    "n" * 5000 + ".png",
    "n" * 251 + ".png",
    "é" * 130 + ".png",
    "d/" * 1500 + "a.png",
    "CON.png",
    "nul.png",
    "COM1.png",
    "a .png",
    "a..png",
    "",
    ".",
    "..",
    ".png",
    " .png",
    "-rf.png",
    "--help.png",
    "x.py:1.jpg",
    "x.py:f",
    "own.py:make.png",
    "photo:chelsea.png",
    "http://127.0.0.1:1/a.png",
    "file:///etc/passwd.png",
    "zip://a.png::x.zip.png",
    "journal.jsonl",
    "journal.jsonl.png",
    ".journal.jsonl.files/a.png",
    ".journal.jsonl.files.png",
    "maps/00000000.tar.png",
    "heads.csv.png",
    "out/a.png",
    "*.png",
    "[a].png",
    "{0}.png",
    "%s.png",
    "a.overlay.png",
    "a.png/b.png",
    "g1.png/x.png",
    "b\udcff.png",
    "g1.png\0.png",
)
TWINS = (
    ("A.png", "a.png"),
    ("t.png", "t.png"),
    ("\u00e9.png", "e\u0301.png"),
    ("t.png", "./t.png"),
    ("t.png", "s/../t.png"),
    ("t.png", "/t.png"),
    ("t.png", "t.jpg"),
    ("stra\u00dfe.png", "STRASSE.png"),
    ("1.t.png", "t.png"),
    ("t.png", "t.overlay.png"),
    ("t/a.png", "t.png/a.png"),
)


@dataclass
class Archive:
    """An archive, and what a run over all its images must and may do.

    Attributes:
        content: Its bytes, or a function that writes them to a file.
        expected: What is expected of its images.
        kind: `tar` or `zip`.
        single: Names of members that may be asked for alone, with the number of the photo.
    """

    content: bytes | Callable[[Path], None]
    expected: Expected
    kind: str
    single: dict[str, int] = field(default_factory=dict)


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield `count` cases."""
    for number in range(count):
        dice = random.Random(f"{seed} archive {number}")
        make = dice.choice([*_TARS, *_TARS, *_ZIPS])
        archive = make(dice)
        yield _given(f"archive {seed}.{number} {make.__name__.strip('_')}", archive, dice)


def _given(name: str, archive: Archive, dice: random.Random) -> Case:
    """Pass an archive in one of the ways that the command understands, with other images before or after it."""
    file, expected = f"x.{archive.kind}", archive.expected
    large = callable(archive.content)
    alone = sorted(archive.single)
    ways = (
        ["file", "file", "pattern", "all", "all", "top", "alone", "list", "lines"]
        if archive.kind == "tar"
        else ["all", "all", "top", "alone", "lines", "file", "list"]
    )
    way = dice.choice([way for way in ways if (alone or way not in ("alone", "lines")) and not (large and way == "list")])
    told = Expected(may={*expected.may, *expected.must.values(), *expected.unnamed})  # where not every image is asked for
    lines = [f"{archive.kind}://{one}::{file}" for one in alone]
    operand = {
        "file": file,
        "pattern": dice.choice([f"*.{archive.kind}", f"?.{archive.kind}", f"./x*.{archive.kind}"]),
        "all": f"{archive.kind}://**::{file}",
        "top": f"{archive.kind}://*::{file}",
        "alone": lines[0] if lines else "",
        "list": "list.txt",
        "lines": "list.txt",
    }[way]
    whole = way in ("file", "pattern") and archive.kind == "tar"
    if whole:
        told = Expected(
            {f"{file}/{end}": number for end, number in expected.must.items()},
            expected.may,
            expected.fails,
            False,
            expected.unnamed,
        )
    elif way == "alone":
        told.must = {f"{one}::{file}": archive.single[one] for one in alone[:1] if one in expected.must}
    elif way in ("all", "top", "lines"):
        reached = {name: number for name, number in archive.single.items() if name in expected.must}
        told.unnamed = [number for name, number in reached.items() if way != "top" or "/" not in name]
    beside = dice.random() < 0.75
    if beside:
        told.must["plain.png"] = 0
    told.may.add(0)
    words, first = options(dice), dice.random() < 0.5

    def prepare(folder: Path) -> list[str]:
        place_of(folder)
        (folder / "x.py").write_text(canary(folder, "x") + "def f():\n    " + canary(folder, "f"))
        (folder / "plain.png").write_bytes(photo(0))
        if callable(archive.content):
            archive.content(folder / file)
        else:
            (folder / file).write_bytes(archive.content)
        listed = [file] if way == "list" else [line.replace(f"::{file}", f"::{folder / file}") for line in lines]
        (folder / "list.txt").write_text("\n".join(listed) + "\n", errors="surrogateescape")
        operands = [operand, "plain.png"] if first else ["plain.png", operand]
        return [*RUN, *words, *(operands if beside else [operand])]

    return Case(f"{name} {way}", prepare, ("out",), prints=True, check=told.check, clear=True)


# members of tar files


def _member(name: str, data: bytes = b"", dice: random.Random | None = None, **fields: object) -> bytes:
    """Return the blocks of a member, in one of the formats."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    formats: list[Any] = [
        tarfile.PAX_FORMAT,
        tarfile.GNU_FORMAT,
        *([tarfile.USTAR_FORMAT] if len(name) < 90 and name.isascii() else []),
    ]
    return info.tobuf(dice.choice(formats) if dice else tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def _header(name: bytes, size: bytes, kind: bytes = b"0", link: bytes = b"") -> bytes:
    """Return a header with fields as they are given."""
    fields = [
        (name, 100),
        (b"0000644\0", 8),
        (b"0000000\0", 8),
        (b"0000000\0", 8),
        (size, 12),
        (b"00000000000\0", 12),
        (b" " * 8, 8),
        (kind, 1),
        (link, 100),
        (b"ustar\x0000", 8),
    ]
    whole = b"".join(value.ljust(width, b"\0")[:width] for value, width in fields).ljust(BLOCK, b"\0")
    return whole[:148] + b"%06o\0 " % sum(whole) + whole[156:]


def _pax(records: bytes, kind: bytes = b"x") -> bytes:
    return _header(b"PaxHeaders/x", b"%011o\0" % len(records), kind) + _padded(records)


def _record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    while length != len(str(length)) + len(key) + len(value) + 3:
        length = len(str(length)) + len(key) + len(value) + 3
    return b"%d %s=%s\n" % (length, key, value)


def _good(dice: random.Random) -> dict[str, int]:
    """Return the names of intact photos."""
    pool = ["g1.png", "sub/g2.png", "deep/er/g3.png", "g4.png"]
    return {name: int(name[-5]) for name in pool[: dice.randint(1, 4)]}


def _tar(dice: random.Random, *hostile: bytes, tail: bytes = bytes(2 * BLOCK), **facts: object) -> Archive:
    """Put members between intact photos."""
    good = _good(dice)
    blocks = [_member(name, photo(number), dice) for name, number in good.items()]
    for member in hostile:
        blocks.insert(dice.randint(0, len(blocks)), member)
    expected = Expected(dict(good), **facts)  # type: ignore[arg-type]
    return Archive(b"".join(blocks) + tail, expected, "tar", dict(good))


def _refusable(archive: Archive) -> Archive:
    """Allow that an archive whose structure is damaged is refused, or read as far as it goes."""
    archive.expected.may |= set(archive.expected.must.values())
    archive.expected.must, archive.expected.unnamed = {}, []
    return archive


def _tar_names(dice: random.Random) -> Archive:
    name = dice.choice(NAMES)
    with_zero = _pax(_record(b"path", name.encode(errors="replace"))) + _member("h.png", photo(7))
    data = with_zero if "\0" in name else _member(name, photo(7), dice)
    return _listed(_tar(dice, data, may={7}), name)


def _listed(archive: Archive, name: str) -> Archive:
    """Allow that an address is refused if fsspec itself cannot list names of such depth; a tar file is then read without it."""
    if name.count("/") > 900:
        archive.single = {}
    return archive


def _tar_twins(dice: random.Random) -> Archive:
    first, second = dice.choice(TWINS)
    bad = first == second or ".." in first + second  # may be refused
    hostile = _member(first, photo(7), dice), _member(second, photo(8), dice)
    return _tar(dice, *hostile, may={7, 8}, unnamed=[] if bad else [7, 8])


def _tar_sizes(dice: random.Random) -> Archive:
    huge = [b"\x80" + (2**70).to_bytes(11, "big"), b"\x80" + (2**63 + 5).to_bytes(11, "big"), b"%011o\0" % (6 << 30)]
    odd = [
        b"\xff" * 10 + b"\xfe\0",
        b"\xff" * 12,
        b"%011o\0" % 3,
        b"00000000000\0",
        b"-0000000001\0",
        b"zzzzzzzzzzz\0",
        b"\0" * 12,
        b"1e3\0",
        b"99999999999\0",
    ]
    size = dice.choice(huge + odd)
    data = _header(dice.choice([b"h.png", b"notes.txt"]), size) + _padded(photo(7))
    return _refusable(_tar(dice, data, may={7}))


def _tar_empty_members(dice: random.Random) -> Archive:
    kind = dice.choice([b"", b"\0", bytes(3000), b"\x89PNG\r\n\x1a\n", photo(7)[:30], b"<svg/>", b"not a photo"])
    return _tar(dice, _member("h.png", kind, dice), fails=True)


def _tar_zeros(dice: random.Random) -> Archive:
    """Write a photo and then gigabytes of zeros, which take no room on the disk."""
    good, size, name = _good(dice), dice.choice([3 << 30, 6 << 30, 9 << 30]), dice.choice(["h.png", "big.txt"])

    def content(file: Path) -> None:
        with file.open("wb") as stream:
            stream.write(_member("g1.png", photo(1)))
            info = tarfile.TarInfo(name)
            info.size = size
            stream.write(info.tobuf(tarfile.GNU_FORMAT) + photo(7))
            stream.seek(size - len(photo(7)), os.SEEK_CUR)
            for one, number in good.items():
                if number > 1:
                    stream.write(_member(one, photo(number)))
            stream.write(bytes(2 * BLOCK))

    return Archive(content, Expected({"g1.png": 1} | good, {7} if name == "h.png" else set()), "tar", {"g1.png": 1} | good)


def _tar_sparse(dice: random.Random) -> Archive:
    """Write sparse members. The data of one, without its holes, is a photo that must not be drawn."""
    data = photo(8)
    size = str(len(data) + 4096).encode()
    hole, full = b"4096,%d" % len(data), b"0,%d" % len(data)
    whole = dice.random() < 0.5
    place = full if whole else hole
    kind = dice.randrange(5)
    if kind == 0:
        records = _record(b"GNU.sparse.size", size) + _record(b"GNU.sparse.numblocks", b"1")
        records += b"".join(
            _record(b"GNU.sparse." + key, value) for key, value in zip((b"offset", b"numbytes"), place.split(b","), strict=True)
        )
    elif kind == 1:
        records = b"".join(
            _record(b"GNU.sparse." + key, value)
            for key, value in ((b"size", size), (b"numblocks", b"1"), (b"map", place), (b"name", b"h.png"))
        )
    elif kind == 2:
        records = b"".join(
            _record(b"GNU.sparse." + key, value)
            for key, value in ((b"major", b"1"), (b"minor", b"0"), (b"name", b"h.png"), (b"realsize", size))
        )
        data = (b"1\n" + place.replace(b",", b"\n") + b"\n").ljust(BLOCK, b"\0") + data
    elif kind == 3:
        bad = dice.choice([b"-5,10", b"0,99999999999999", b"x,y", b"1", b"0,3,0,3", b"9" * 4000 + b",1"])
        records = b"".join(
            _record(b"GNU.sparse." + key, value)
            for key, value in ((b"size", dice.choice([size, b"9" * 30, b"-1"])), (b"map", bad))
        )
        whole = False
    else:
        return _of_program(dice)
    archive = _tar(dice, _pax(records) + _member("h.png", data), may={8} if whole else set())
    return archive if kind < 3 else _refusable(archive)


@functools.cache
def _sparse_file() -> bytes | None:
    """Return a tar file with a sparse photo, as the program writes it; None without the program."""
    program = shutil.which("tar")
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "g1.png").write_bytes(photo(1))
        with (folder / "h.png").open("wb") as stream:
            stream.write(photo(8))
            stream.truncate(1 << 20)
            stream.seek(3 << 20)
            stream.write(b"end")
        done = subprocess.run(
            [program, "-S", "-c", "-f", "x.tar", "g1.png", "h.png"], cwd=folder, check=False, capture_output=True
        )
        return (folder / "x.tar").read_bytes() if done.returncode == 0 else None


def _of_program(dice: random.Random) -> Archive:
    content = _sparse_file()
    if content is None:
        return _tar_names(dice)
    return Archive(content, Expected({"g1.png": 1}, {8}), "tar", {"g1.png": 1})


def _tar_hard_links(dice: random.Random) -> Archive:
    outside = dice.choice(
        ["../outside/secret.png", "/etc/passwd", "missing.png", "h.png", "plain.png", "../work/plain.png", "later.png", "sub", ""]
    )
    link = _member("h.png", b"", dice, type=tarfile.LNKTYPE, linkname=outside)
    archive = _tar(dice, link, fails=True)
    if outside == "later.png":
        tail = _member("later.png", photo(8), dice)
        archive.content = bytes(archive.content[: -2 * BLOCK]) + tail + bytes(2 * BLOCK)  # type: ignore[index]
        archive.expected.may |= {8}
        archive.expected.fails = False
    return archive


def _tar_links_to_members(dice: random.Random) -> Archive:
    """Link to the last of two members of one name, which may be refused, or along a chain."""
    first = _member("t.png", photo(7), dice)
    again = _member("t.png", photo(8), dice) if dice.random() < 0.5 else b""
    link = _member("h.png", b"", dice, type=tarfile.LNKTYPE, linkname="t.png")
    chain = _member("i.png", b"", dice, type=tarfile.LNKTYPE, linkname="h.png") if dice.random() < 0.5 else b""
    last = 8 if again else 7
    linked = [last] * (1 + bool(chain))
    return _tar(dice, first + again + link + chain, may={7, 8}, unnamed=linked if again else [7, *linked])


def _tar_other_kinds(dice: random.Random) -> Archive:
    kind = dice.choice(
        [
            tarfile.SYMTYPE,
            tarfile.CHRTYPE,
            tarfile.BLKTYPE,
            tarfile.FIFOTYPE,
            tarfile.DIRTYPE,
            tarfile.CONTTYPE,
            b"Z",
            b"V",
            b"M",
            b"D",
        ]
    )
    target = dice.choice(["../outside/secret.png", "/etc/passwd", "g1.png", "h.png", "/dev/zero", "", "x" * 3000])
    info: dict[str, Any] = {"type": kind, "linkname": target if kind == tarfile.SYMTYPE else "", "devmajor": 1, "devminor": 5}
    data = photo(7) if kind in (tarfile.CONTTYPE, b"Z") else b""
    return _tar(dice, _member(dice.choice(["h.png", "sub/h.png"]), data, **info), may={7, 1})


def _tar_nested(dice: random.Random) -> Archive:
    inner = _member("inner.png", photo(8)) + bytes(2 * BLOCK)
    return _tar(dice, _member(dice.choice(["n.tar", "n.png", "n.tar.gz"]), inner, dice))


def _tar_cut(dice: random.Random) -> Archive:
    archive = _tar(dice)
    content = archive.content
    assert isinstance(content, bytes)
    archive.content = content[: dice.randrange(len(content) - 2 * BLOCK)]
    return _refusable(archive)


def _tar_flipped(dice: random.Random) -> Archive:
    archive = _tar(dice)
    content = bytearray(archive.content)  # type: ignore[arg-type]
    for _ in range(dice.choice([1, 1, 3, 20])):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    archive.content = bytes(content)
    return _refusable(archive)


def _tar_pax(dice: random.Random) -> Archive:
    """Write extended headers that are odd, and global ones."""
    harmless = [
        _pax(_record(b"comment", b"x" * 3000), b"g"),
        _pax(_record(b"mtime", b"1e400")),
        _pax(_record(b"mtime", b"x")),
        _pax(_record(b"SCHILY.xattr.user.x", b"\xff\0")),
        _pax(_record(b"hdrcharset", b"BINARY")),
    ]
    broken = [
        _pax(_record(b"path", b"evil.png"), b"g"),
        _pax(_record(b"size", b"3"), b"g"),
        _pax(_record(b"size", b"9" * 40)),
        _pax(_record(b"size", b"-5")),
        _pax(b"5 a=\n99999 path=x\n"),
        _pax(b"0 path=x\n"),
        _pax(b"x" * 700),
        _pax(b"9" * 6000 + b" path=x\n"),
        _pax(_record(b"path", b"\xff\xfe.png")),
        _header(b"L", b"%011o\0" % 6000, b"L") + _padded(b"n" * 6000),
        _header(b"K", b"%011o\0" % 6000, b"K") + _padded(b"n" * 6000),
        _header(b"L", b"%011o\0" % (1 << 33), b"L"),
        _pax(b"") * 1200,
        _header(b"L", b"%011o\0" % 3, b"L") * 1,
    ]
    if dice.random() < 0.4:
        return _tar(dice, dice.choice(harmless) + _member("h.png", photo(7)), unnamed=[7])
    return _refusable(_tar(dice, dice.choice(broken) + _member("h.png", photo(7)), may={7}))


def _tar_ends(dice: random.Random) -> Archive:
    tail = dice.choice([b"", bytes(BLOCK), bytes(100), bytes(BLOCK) + b"x" * BLOCK, b"garbage", b"\xff" * 5000])
    return _refusable(_tar(dice, tail=tail))


def _tar_after_the_end(dice: random.Random) -> Archive:
    """Write something after the blocks that end the archive, which programs do not read."""
    more = dice.choice([b"garbage", bytes(1 << 20), b"\xff" * 5000, _member("after.png", photo(8)) + bytes(2 * BLOCK)])
    return _tar(dice, tail=bytes(2 * BLOCK) + more, may={8})


def _tar_not(dice: random.Random) -> Archive:
    content = dice.choice(
        [
            b"",
            b"\0",
            bytes(BLOCK),
            bytes(10240),
            photo(7),
            b"x" * 2000,
            zlib.compress(bytes(5000)),
            dice.randbytes(3000),
            _packed([("g1.png", photo(1))]),
        ]
    )
    return Archive(content, Expected(fails=content != photo(7), may={1, 7}), "tar")  # a list names a photo, whatever its ending


def _tar_many(dice: random.Random) -> Archive:
    """Write many members that are no photos."""
    more = b"".join(_header(b"n%d.txt" % number, b"00000000000\0") for number in range(dice.choice([100, 20_000])))
    return _tar(dice, more)


# members of zip files


def _packed(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members:
            info = zipfile.ZipInfo("x")
            info.filename = name
            info.compress_type = method
            archive.writestr(info, data)
        archive.comment = comment
    return stream.getvalue()


def _zip(dice: random.Random, *hostile: tuple[str, bytes], comment: bytes = b"", **facts: object) -> Archive:
    good = _good(dice)
    members = [(name, photo(number)) for name, number in good.items()]
    for member in hostile:
        members.insert(dice.randint(0, len(members)), member)
    content = _packed(members, dice.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]), comment)
    return Archive(content, Expected(dict(good), **facts), "zip", dict(good))  # type: ignore[arg-type]


def _edited(archive: Archive, name: bytes, local: tuple[int, bytes], central: tuple[int, bytes]) -> Archive:
    """Change bytes of the two headers of a member, at an offset from the signature of each."""
    content = bytearray(archive.content)  # type: ignore[arg-type]
    for signature, width, (offset, value) in ((b"PK\3\4", 30, local), (b"PK\1\2", 46, central)):
        start = content.find(signature)
        while start >= 0 and content[start + width : start + width + len(name)] != name:
            start = content.find(signature, start + 1)
        if start >= 0:
            content[start + offset : start + offset + len(value)] = value
    archive.content = bytes(content)
    return archive


def _zip_names(dice: random.Random) -> Archive:
    name = dice.choice([name for name in NAMES if "\udcff" not in name])
    return _listed(_zip(dice, (name, photo(7)), may={7}), name)


def _zip_twins(dice: random.Random) -> Archive:
    first, second = dice.choice([pair for pair in TWINS if not any(part in "".join(pair) for part in ("./", "/t"))])
    archive = _zip(dice, (first, photo(7)), (second, photo(8)), may={7, 8})
    if first != second:
        archive.single |= {first: 7, second: 8}
        archive.expected.must |= {first: 7, second: 8}
    return archive


def _zip_encrypted(dice: random.Random) -> Archive:
    return _edited(_zip(dice, ("h.png", photo(7))), b"h.png", (6, b"\1\0"), (8, b"\1\0"))


def _zip_methods(dice: random.Random) -> Archive:
    if dice.random() < 0.3:  # methods that Python unpacks without a bound
        packed = _packed([("h.png", photo(7))], dice.choice([zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))
        return Archive(packed, Expected(fails=True), "zip")
    method = struct.pack("<H", dice.choice([1, 6, 9, 12, 14, 93, 97, 99, 0xFFFF]))
    archive = _zip(dice, ("h.png", photo(7)), may={7})  # the method may be the true one
    return _edited(archive, b"h.png", (8, method), (10, method))


def _zip_sums(dice: random.Random) -> Archive:
    return _edited(_zip(dice, ("h.png", photo(7))), b"h.png", (14, b"\1\2\3\4"), (16, b"\1\2\3\4"))


def _zip_sizes(dice: random.Random) -> Archive:
    size = dice.choice([b"\xff\xff\xff\xff", b"\xfe\xff\xff\xff", b"\0\0\0\0", b"\1\0\0\0", b"\0\0\0\x7f"])
    at = dice.choice([(18, 20), (22, 24)])
    archive = _edited(_zip(dice, ("h.png", photo(7)), may={7}), b"h.png", (at[0], size), (at[1], size))
    return _refusable(archive) if size == b"\xff\xff\xff\xff" else archive


def _zip_overlaps(dice: random.Random) -> Archive:
    """Let two names of the directory share one local header, or point into nowhere."""
    place = struct.pack("<I", dice.choice([0, 0, 5, 0x7FFFFFFF, 0xFFFFFFFE]))
    return _edited(_zip(dice, ("h.png", photo(7)), may={1, 2, 3, 4, 7}), b"h.png", (0, b""), (42, place))


def _zip_bombs(dice: random.Random) -> Archive:
    good = _good(dice)
    stream = io.BytesIO(_bomb())
    with zipfile.ZipFile(stream, "a") as archive:
        for name, number in good.items():
            archive.writestr(name, photo(number))
    return Archive(stream.getvalue(), Expected(dict(good), {7}), "zip", dict(good))


@functools.cache
def _bomb() -> bytes:
    """Return an archive with a photo that is followed by half a gigabyte of zeros."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive, archive.open("h.png", "w") as member:
        member.write(photo(7))
        for _ in range(512):
            member.write(bytes(1 << 20))
    return stream.getvalue()


def _zip_comments(dice: random.Random) -> Archive:
    comment = dice.choice([b"x" * 65535, b"PK\5\6" + bytes(18), b"PK\1\2" * 50, b"\x1b]0;x\a"])
    archive = _zip(dice, comment=comment)
    return _refusable(archive) if b"PK" in comment else archive


def _zip_cut(dice: random.Random) -> Archive:
    archive = _zip(dice)
    archive.content = archive.content[: dice.randrange(len(archive.content) - 5)]  # type: ignore[index, arg-type]
    return _refusable(archive)


def _zip_flipped(dice: random.Random) -> Archive:
    archive = _zip(dice)
    content = bytearray(archive.content)  # type: ignore[arg-type]
    for _ in range(dice.choice([1, 1, 3, 20])):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    archive.content = bytes(content)
    return _refusable(archive)


def _zip_wide(dice: random.Random) -> Archive:
    """Write the fields of zip64, right or wrong."""
    stream = io.BytesIO()
    good = _good(dice)
    with zipfile.ZipFile(stream, "w") as archive:
        for name, number in good.items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(photo(number))
        if wrong := dice.random() < 0.5:
            info = zipfile.ZipInfo("h.png")
            info.extra = dice.choice(
                [b"\1\0\x08\0" + b"\xff" * 8, b"\1\0\xff\xff", b"\1\0\x04\0abcd", b"\x99\x99\x02\0xx", b"\1\0\0\0"]
            )
            archive.writestr(info, photo(7))
    result = Archive(stream.getvalue(), Expected(dict(good), {7}), "zip", dict(good))
    return _refusable(result) if wrong else result


def _zip_surrounded(dice: random.Random) -> Archive:
    archive = _zip(dice)
    before, after = dice.choice(
        [(b"#!/bin/sh\n" + b"x" * 900, b""), (photo(7), b""), (b"", b"garbage" * 9), (b"", bytes(70_000))]
    )
    archive.content = before + archive.content + after  # type: ignore[operator]
    archive.expected.may |= {7} if before == photo(7) else set()  # a list names it as a photo, which it is too
    return _refusable(archive) if after else archive


def _zip_not(dice: random.Random) -> Archive:
    content = dice.choice([b"", b"PK", b"PK\5\6" + bytes(18), photo(7), dice.randbytes(2000), b"PK\3\4" * 90])
    return Archive(content, Expected(fails=True, may={7} if content == photo(7) else set()), "zip")


_TARS = (
    _tar_names,
    _tar_names,
    _tar_twins,
    _tar_sizes,
    _tar_empty_members,
    _tar_zeros,
    _tar_sparse,
    _tar_sparse,
    _tar_hard_links,
    _tar_links_to_members,
    _tar_other_kinds,
    _tar_nested,
    _tar_cut,
    _tar_flipped,
    _tar_pax,
    _tar_ends,
    _tar_after_the_end,
    _tar_not,
    _tar_many,
)
_ZIPS = (
    _zip_names,
    _zip_names,
    _zip_twins,
    _zip_encrypted,
    _zip_methods,
    _zip_sums,
    _zip_sizes,
    _zip_overlaps,
    _zip_bombs,
    _zip_comments,
    _zip_cut,
    _zip_flipped,
    _zip_wide,
    _zip_surrounded,
    _zip_not,
)
