"""Journal of a run: a line for each image that is done or has failed, written after its files."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

from visattn._support.checks import printable
from visattn._support.files import refusal
from visattn.errors import OutputError

_FIRST = "visattn batch"
_KNOWN = len(f'{{"{_FIRST}":')  # bytes with which each journal begins


class Entry(NamedTuple):
    """Line of a journal.

    Attributes:
        number: Number of the image in the run.
        image: Its path, as it was given; empty if the run has no image of this number any more.
        name: Path of its files, without an ending, relative to the output folder.
        sha256: Digest of its file; empty if it could not be read.
        outputs: Files that were written for it, relative to the output folder.
        error: Why there are none; empty if there are.
        warnings: Why its results may mislead.
    """

    number: int
    image: str
    name: str
    sha256: str
    outputs: tuple[str, ...] = ()
    error: str = ""
    warnings: tuple[str, ...] = ()


class Journal:
    """File of lines that only grows. One run at a time may write it.

    Attributes:
        known: Last entry of each image, by its number.
        new: Whether no run with these settings was begun before.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Open the journal, and go on from it if it exists.

        Args:
            path: Its file.
            settings: What decides the results. A journal of other settings is refused.

        Raises:
            OutputError: If another run writes it, it is of other settings, or it cannot be written.
        """
        self.path = path
        self.known: dict[int, Entry] = {}
        self.new = False
        name = printable(str(path))
        try:
            self._stream = path.open("a+b")
        except OSError as error:
            refused = refusal(error, path)
            raise refused from error
        try:
            self._begin(name, settings)
        except BaseException:
            self._stream.close()
            raise

    def _begin(self, name: str, settings: Mapping[str, Any]) -> None:
        """Lock the file, drop a line that was cut off, and read the entries or write the settings."""
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"{name}: another run writes it. Wait for its end, or choose another folder (-o/--output)."
            ) from error
        except OSError as error:
            refused = refusal(error, self.path)
            raise refused from error
        self._stream.seek(0)
        whole, _, torn = self._stream.read().rpartition(b"\n")
        lines = whole.decode(errors="replace").splitlines()
        told = {_FIRST: 1, "settings": json.loads(json.dumps(settings))}
        if lines:
            _parsed(name, lines)  # raises for the file of something else
        elif not json.dumps(told).encode().startswith(torn[:_KNOWN]):
            raise _damaged(name)
        if torn:  # a line that a kill cut off
            self._stream.truncate(len(whole) + 1 if whole else 0)
        for other in journals_in(self.path.parent):  # parts of one run share the names of files
            if other != self.path and other.stat().st_size:
                _check(printable(str(other)), _settings_of(other), told)
        if lines:
            first, self.known = _parsed(name, lines)
            if self.known or first == told:
                _check(name, first, told)
                return
            self._stream.truncate(0)  # of a run that did nothing
        self.new = True
        self._append([json.dumps(told)])

    def add(self, entries: Iterable[Entry]) -> None:
        """Append entries, and flush them to the disk."""
        some = list(entries)
        self._append([json.dumps(list(entry)) for entry in some])
        self.known |= {entry.number: entry for entry in some if entry.image}
        for entry in some:
            if not entry.image:
                self.known.pop(entry.number, None)

    def _append(self, lines: Iterable[str]) -> None:
        try:
            self._stream.write("".join(f"{line}\n" for line in lines).encode())
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            refused = refusal(error, self.path)
            raise refused from error

    def __enter__(self) -> Self:
        """Return the journal itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the file."""
        with suppress(*([OSError] if error else [])):  # what could not be written was told
            self._stream.close()


def _check(name: str, first: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Check that a journal is of a run with these settings.

    Raises:
        OutputError: If it is not.
    """
    if first != told:
        differs = _differs(first["settings"], told["settings"])
        raise OutputError(f"{name}: is of a run with other settings ({differs}). Choose another folder (-o/--output).")


def _settings_of(path: Path) -> dict[str, Any]:
    with _reading(path) as stream:
        return _parsed(printable(str(path)), [stream.readline().decode(errors="replace")])[0]


def _reading(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        raise OutputError(f"{printable(str(path))}: cannot be read ({cause}). Check its permissions.") from error


def journals_in(folder: Path) -> list[Path]:
    """Return the journals of a run and its parts, by name."""
    return sorted(folder.glob("journal*.jsonl"))


def entries_of(path: Path) -> dict[int, Entry]:
    """Read the last entry of each image from a journal that another run may be writing.

    Raises:
        OutputError: If it is damaged, or cannot be read.
    """
    with _reading(path) as stream:
        whole, _, _ = stream.read().rpartition(b"\n")
    return _parsed(printable(str(path)), whole.decode(errors="replace").splitlines())[1] if whole else {}


def other_lists(journal: Path, images: Sequence[str]) -> Iterator[str]:
    """Find other parts of a run that were computed from another list of images, as when files were still being copied.

    Args:
        journal: Journal of this part.
        images: The images of this run.

    Yields:
        What is wrong with the journal of each such part.

    Raises:
        OutputError: If a journal is damaged, or cannot be read.
    """
    for path in journals_in(journal.parent):
        for number, entry in entries_of(path).items() if path != journal else ():
            here = images[number] if number < len(images) else "none"
            if here != entry.image:
                what = f"its image {number} is {printable(entry.image)}, that of this part {printable(here)}"
                yield f"{printable(str(path))}: is of another list of images ({what}). Run that part again."
                break


def _parsed(name: str, lines: Sequence[str]) -> tuple[dict[str, Any], dict[int, Entry]]:
    """Return the first line of a journal, and the last entry of each image."""
    try:
        first, *others = map(json.loads, lines)
        if not isinstance(first["settings"], dict):
            raise TypeError("settings")
        entries = [
            Entry(number, image, of, sha256, tuple(outputs), error, tuple(warnings))
            for number, image, of, sha256, outputs, error, warnings in others
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(name) from error
    last = {entry.number: entry for entry in entries}
    return first, {number: entry for number, entry in last.items() if entry.image}


def _damaged(name: str) -> OutputError:
    return OutputError(f"{name}: is damaged. Choose another folder (-o/--output) to compute everything again.")


def _differs(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in names[:3])[:200]
