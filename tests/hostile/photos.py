"""Photos that are recognized in the results of `visattn batch`: each has one color, and with opacity 0 so has its picture."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import random
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from tests.hostile.driver import Outcome
from tests.hostile.models import FILE

SECRET = 99  # number of a photo that no input gives
OUT = "out"
RUN = ["batch", "--model", "own.py:make", "--img-size", "32", "--opacity", "0", "-o", OUT]
CANARY = "open({place!r}, 'w').close()\n"


@functools.cache
def photo(number: int) -> bytes:
    """Return the file of a photo."""
    stream = io.BytesIO()
    Image.new("RGB", (12, 8), color(number)).save(stream, "PNG")
    return stream.getvalue()


def color(number: int) -> tuple[int, int, int]:
    """Return the color of a photo."""
    return (number * 53 % 256, number * 101 % 256, number % 256)


_NUMBERS = {color(number): number for number in range(100)}


def place_of(folder: Path) -> Path:
    """Write what each command needs: a model, a photo of another folder, and a folder where code would leave a trace."""
    parts = dict.fromkeys(("top", "init", "begin", "before", "after", "end"), "pass") | {"make": "torch.manual_seed(0)"}
    (folder / "own.py").write_text(FILE.format(**parts, channels="3", stride="16", arguments=""))
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "secret.png").write_bytes(photo(SECRET))
    (outside / "victim").write_bytes(b"mine\n")
    (folder.parent / "canaries").mkdir()
    return outside


def canary(folder: Path, name: str) -> str:
    """Return code that leaves a trace when it runs."""
    return CANARY.format(place=str(folder.parent / "canaries" / name))


def options(dice: random.Random) -> list[str]:
    """Return options that do not change which pictures are right."""
    more = [["--maps"], ["--stats"], ["--pack-maps"], ["--batch-size", "2"], ["--workers", "1"]]
    return [word for words in more if dice.random() < 0.12 for word in words] + ["-q"] * (dice.random() < 0.8)


@dataclass
class Expected:
    """Expectation of what a run of `visattn batch` must and may do.

    Attributes:
        must: Number of the photo of each input that has to be drawn, by the end of its name in the journal.
        may: Numbers of further photos that may be drawn.
        fails: Whether some input fails for certain.
        ends: Whether the run may be refused as a whole.
        unnamed: Numbers of photos that have to be drawn, under any name.
        passes: Whether nothing may fail.
        stays: Names that were in the output folder before, and may stay.
        images: Number of images, if the journal may have lines of others, or damaged ones.
    """

    must: dict[str, int] = field(default_factory=dict)
    may: set[int] = field(default_factory=set)
    fails: bool = False
    ends: bool = False
    unnamed: list[int] = field(default_factory=list)
    passes: bool = False
    stays: tuple[str, ...] = ()
    images: int | None = None

    def check(self, folder: Path, found: Outcome) -> list[str]:
        """Describe what is wrong with the results."""
        if self.ends and found.code > 1:
            return []
        out = folder / OUT
        shown = {path: _shown(path) for path in _files(out) if path.name.endswith(".overlay.png")}
        needed = [*self.must.values(), *self.unnamed]
        known: set[int | None] = {*needed, *self.may}
        known |= {None} if -1 in known else set()
        wrong = [f"{path.relative_to(out)} shows {number}" for path, number in shown.items() if number not in known]
        missing = Counter(needed) - Counter(number for number in shown.values() if number is not None)
        wrong += [f"no picture of {sorted(missing.elements())}"] if missing else []
        wrong += [f"refused as a whole ({found.code})"] if missing and found.code > 1 else []
        wrong += [f"{path.relative_to(out)} is {kind}" for path, kind in _odd(out) if path.name not in self.stays]
        if self.fails and found.code == 0:
            wrong.append("exit 0 although an input failed")
        if self.passes and found.code == 1:
            wrong.append("an input failed that is valid")
        if needed and found.code not in (0, 1) and not missing:
            wrong.append(f"exit code {found.code} of a run whose other images are done")
        return wrong + (self._of_journal(out, found, shown) if found.code < 2 else [])

    def _of_journal(self, out: Path, found: Outcome, shown: Mapping[Path, int | None]) -> list[str]:
        journal = out / "journal.jsonl"
        if not _is_regular(journal):
            return [] if "journal.jsonl" in self.stays else [f"no journal of the run ({found.code})"]
        last: dict[int, list[Any]] = {}
        for line in journal.read_bytes().splitlines()[1:]:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            if isinstance(entry, dict) and [*entry] == ["writes"]:  # what is about to be written
                continue
            if self.images is None and not (isinstance(entry, list) and len(entry) == 8):
                return [f"wrote {line[:80]!a} to the journal"]
            if isinstance(entry, list) and len(entry) == 8 and type(entry[0]) is int and entry[0] in range(self.images or 10**9):
                last[entry[0]] = entry
        wrong = [text for entry in last.values() for text in self._of_entry(out, entry, shown)]
        failed = sum(bool(entry[5]) for entry in last.values())
        errors = sum(line.startswith("visattn: error:") for line in found.err.splitlines())
        if failed > errors:
            wrong.append(f"{failed} failed images, {errors} errors printed")
        if found.code == 0 and (failed or errors):
            wrong.append(f"exit 0 with {failed} failed images and {errors} errors")
        strange = [line for line in found.err.splitlines() if not line.startswith("visattn: ")]
        return wrong + [f"printed {line[:80]!a}" for line in strange[:1]]

    def _of_entry(self, out: Path, entry: list[Any], shown: Mapping[Path, int | None]) -> list[str]:
        _, image, _, digest, outputs, error, _, _ = entry
        if (
            error
            or not isinstance(image, str)
            or not isinstance(outputs, dict)
            or not all(isinstance(name, str) for name in outputs)
        ):
            return []
        numbers = {shown[out / name] for name in outputs if out / name in shown}
        wrong = [
            f"{image[-60:]!a} shows {number}" for end, number in self.must.items() if image.endswith(end) and {number} != numbers
        ]
        wrong += [f"{name[-60:]!a} of the journal is missing" for name in outputs if not _is_regular(out / name)]
        named = _DIGESTS.get(str(digest))
        return wrong + (
            [f"{image[-60:]!a} has the digest of {named} and shows {numbers}"] if named is not None and numbers != {named} else []
        )


_DIGESTS = {hashlib.sha256(photo(number)).hexdigest(): number for number in range(100)}


def _files(out: Path) -> Iterable[Path]:
    for place, _, names in os.walk(out):
        yield from (Path(place, name) for name in names)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def _shown(path: Path) -> int | None:
    if not _is_regular(path):
        return None
    try:
        with Image.open(path) as picture:
            colors = picture.convert("RGB").getcolors(1)
    except (OSError, ValueError):
        return None
    return _NUMBERS.get(colors[0][1]) if colors else None  # type: ignore[arg-type]


def _odd(out: Path) -> Iterable[tuple[Path, str]]:
    """Yield what a run must not leave in its folder."""
    for path in _files(out):
        mode = path.lstat().st_mode
        if path.name.startswith("."):
            yield path, "left"
        elif stat.S_ISREG(mode) and not mode & stat.S_IRUSR:
            yield path, "unreadable"
