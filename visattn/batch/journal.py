"""Journal of a run: a line for each image that is done or has failed, written after its files."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import msgspec

from visattn._support.checks import printable
from visattn._support.json_files import decoded
from visattn._support.language import flag
from visattn._support.outside import fault_of
from visattn._support.untrusted import check_own, open_own, read_own
from visattn._support.whole_files import refusal
from visattn.batch.settings import ALL, differences
from visattn.errors import OutputError

_FIRST = "visattn batch"
_KNOWN = len(f'{{"{_FIRST}":')  # bytes with which each journal begins
_SHOWN = 3  # differences in a message
FILES = "journal*.jsonl"
SPARE = ".journal*.files"

_T = TypeVar("_T")
_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


class Entry(NamedTuple):
    """Line of a journal.

    Attributes:
        number: Number of the image in the run.
        image: Its path, as it was given; empty if the run has no image of this number any more.
        name: Path of its files, without an ending, relative to the output folder.
        sha256: Digest of its file; empty if it could not be read.
        outputs: Files that were written for it, relative to the output folder, with the SHA-256 of each.
        error: Why there are none; empty if there are.
        warnings: Why its results may mislead.
        sample: Values of its map, by which a later run is compared; None for NaN.
    """

    number: _Number
    image: str
    name: str
    sha256: str
    outputs: Mapping[str, str] = {}
    error: str = ""
    warnings: tuple[str, ...] = ()
    sample: tuple[float | None, ...] = ()


class Head(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a run, the first line of a journal; a later one tells of a change that the user accepted.

    Attributes:
        kind: Version of the format.
        settings: What decides the results.
        made_by: Versions, processor and device.
        changed: What is other than before.
    """

    settings: dict[str, Any]
    kind: int = msgspec.field(default=1, name=_FIRST)
    made_by: dict[str, str] = {}
    changed: list[str] = []


class Intent(msgspec.Struct, forbid_unknown_fields=True):
    """Line before the files of a batch are written: a run that is killed leaves no file that no journal names.

    Attributes:
        writes: The files, relative to the output folder.
    """

    writes: list[str]


class _Content(NamedTuple):
    """Content of a journal.

    Attributes:
        head: Its settings, as they were stated last.
        known: Last entry of each image.
        since: Numbers of the images that were entered since the settings were stated.
        damaged: Lines that cannot be read, counted from 1.
        intended: Files that a run was about to write.
    """

    head: Head
    known: dict[int, Entry]
    since: set[int]
    damaged: list[int]
    intended: set[str]


class Journal:
    """File of lines that only grows. One run at a time may write it.

    Attributes:
        known: Last entry of each image, by its number.
        comparable: Numbers of the images that were computed with the settings that were stated last.
        new: Whether no run with these settings was begun before.
        damaged: Lines that cannot be read; their images are not known.
        before: What made the former results, see `settings.maker`.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], made_by: Mapping[str, str] | None = None, *, accept: bool = False
    ) -> None:
        """Open the journal, and go on from it if it exists. Nothing is written before `start` or `add`.

        Args:
            path: Its file.
            settings: What decides the results. A journal of other settings is refused.
            made_by: What may change the last bits of results.
            accept: Whether other settings are accepted, and written down as a change.

        Raises:
            OutputError: If another run writes it, it is of other settings or no journal, something else than a file has its name, or it
                cannot be written.
        """
        self.path = path
        self.known: dict[int, Entry] = {}
        self.comparable: set[int] = set()
        self.new = False
        self.damaged: list[int] = []
        self.before: dict[str, str] = {}
        self._head = Head(json.loads(json.dumps(settings)), made_by=dict(made_by or {}))
        self._accept = accept
        self._keep: int | None = 0  # bytes before the first line that is written; None afterward
        self._stated = False
        check_own(path.parent, files=(FILES,), folders=(SPARE,))
        try:
            self._stream = os.fdopen(open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b")
        except OSError as error:
            refused = refusal(error, path)
            raise refused from error
        try:
            self._begin(printable(str(path)))
        except BaseException:
            self._close()
            raise

    def _begin(self, name: str) -> None:
        """Lock the file, and read it."""
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._stream.fileno()).st_ino != self.path.lstat().st_ino:  # a refused run has just removed it
                raise BlockingIOError
        except BlockingIOError as error:
            raise OutputError(
                f"{name}: another run writes it. Wait for its end, or choose another folder{flag('output')}."
            ) from error
        except OSError as error:
            refused = refusal(error, self.path)
            raise refused from error
        self._stream.seek(0)
        whole, newline, torn = self._stream.read().rpartition(b"\n")
        if not whole and not _encoded(self._head).startswith(torn[:_KNOWN]):
            raise _foreign(name)
        content = _parsed(name, whole) if whole else None
        for other in journals_in(self.path.parent):  # parts of one run share the names of files
            if other != self.path and (head := head_of(other)):
                self._check(printable(str(other)), head)
        if content is None:
            self.new = True
        elif content.known or not differences(content.head.settings, self._head.settings):
            self._check(name, content.head)
            self.known, self.damaged = content.known, content.damaged
            self.comparable = set() if self._head.changed else content.since
            self.before = content.head.made_by
            self._keep = len(whole) + len(newline)
            self._stated = not self._head.changed and self.before == self._head.made_by
        else:
            self.new = True  # the former run did nothing

    def _check(self, name: str, former: Head) -> None:
        """Note what differs from a journal's settings.

        Raises:
            OutputError: If something does, and changes are not accepted.
        """
        changes = differences(former.settings, self._head.settings)
        changes = [change for change in changes if f".{ALL} " not in change] or changes  # a digest tells a user nothing
        if changes and not self._accept:
            more = f", and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
            raise OutputError(
                f"{name}: is of a run with other settings ({', '.join(changes[:_SHOWN])}{more}). Choose another folder{flag('output')}, or "
                f"keep former results beside new ones{flag('accept_changes')}."
            )
        self._head.changed += [change for change in changes if change not in self._head.changed]

    @property
    def changed(self) -> list[str]:
        """Changes that were accepted."""
        return self._head.changed

    @property
    def now(self) -> dict[str, str]:
        """Versions, processor and device of this run, see `settings.maker`."""
        return self._head.made_by

    def accept(self, changes: Iterable[str]) -> None:
        """Note changes after which former results are not compared any more."""
        self._head.changed += changes
        self._stated = False

    def start(self) -> None:
        """Write the settings, unless the journal states them already."""
        if not self._stated:
            self._append([])

    def intend(self, files: Iterable[str]) -> None:
        """Note the files of a batch before they are written."""
        self._append([json.dumps({"writes": sorted(set(files))})])

    def add(self, entries: Iterable[Entry]) -> None:
        """Append entries, and flush them to the disk."""
        some = list(entries)
        self._append([json.dumps([*entry[:4], dict(entry.outputs), *entry[5:]]) for entry in some])
        self.known |= {entry.number: entry for entry in some if entry.image}
        for entry in some:
            if not entry.image:
                self.known.pop(entry.number, None)

    def _append(self, lines: Iterable[str]) -> None:
        whole = [*([] if self._stated else [_encoded(self._head).decode()]), *lines]
        try:
            if self._keep is not None:
                self._stream.truncate(self._keep)  # drops a line that a kill cut off, or a run that did nothing
            self._keep, self._stated = None, True
            self._stream.write("".join(f"{line}\n" for line in whole).encode())
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
            self._close()

    def _close(self) -> None:
        """Close the file; if nothing was written, there is none."""
        with suppress(OSError):
            if os.fstat(self._stream.fileno()).st_size == 0:
                self.path.unlink(missing_ok=True)
        self._stream.close()


def _encoded(head: Head) -> bytes:
    facts = {_FIRST: head.kind, "settings": head.settings, "made_by": head.made_by}
    return json.dumps(facts | ({"changed": head.changed} if head.changed else {})).encode()


def head_of(path: Path) -> Head | None:
    """Return the settings of a journal that another run may be writing; None if it is empty.

    Raises:
        OutputError: If it is no journal, or cannot be read.
    """
    whole, newline, _ = _read(path).rpartition(b"\n")
    return _parsed(printable(str(path)), whole).head if newline else None


def _read(path: Path) -> bytes:
    try:
        return read_own(path)
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        raise OutputError(f"{printable(str(path))}: cannot be read ({cause}). Check its permissions.") from error


def journals_in(folder: Path) -> list[Path]:
    """Return the journals of a run and its parts, by name."""
    return sorted(folder.glob(FILES))


def entries_of(path: Path) -> dict[int, Entry]:
    """Read the last entry of each image from a journal that another run may be writing.

    Raises:
        OutputError: If it is no journal, or cannot be read.
    """
    whole, newline, _ = _read(path).rpartition(b"\n")
    return _parsed(printable(str(path)), whole).known if newline else {}


def files_of(path: Path) -> set[str]:
    """Return all files that a journal names: those that were written, and those that were about to be."""
    whole, newline, _ = _read(path).rpartition(b"\n")
    if not newline:
        return set()
    content = _parsed(printable(str(path)), whole)
    return content.intended.union(*(entry.outputs for entry in content.known.values()))


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


def _parsed(name: str, whole: bytes) -> _Content:
    """Return what the lines of a journal say; of those that cannot be read, the numbers."""
    first, *others = whole.split(b"\n")
    head = _as(first, Head)
    if head is None:
        raise _foreign(name)
    known: dict[int, Entry] = {}
    since: set[int] = set()
    damaged: list[int] = []
    intended: set[str] = set()
    for number, line in enumerate(others, start=2):
        if line.startswith(b'{"writes"') and (intent := _as(line, Intent)):
            intended |= set(intent.writes)
        elif line.startswith(b"{") and (later := _as(line, Head)):
            head, since = later, since if not later.changed else set()
        elif (entry := _as(line, Entry)) and not any(map(fault_of, entry.outputs)):
            known.pop(entry.number, None)
            if entry.image:
                known[entry.number] = entry
                since.add(entry.number)
        else:
            damaged.append(number)
    return _Content(head, known, since, damaged, intended)


def _as(line: bytes, kind: type[_T]) -> _T | None:
    """Return a line as an object of a kind, or None."""
    try:
        return decoded(line, kind, lax=True)
    except ValueError:
        return None


def _foreign(name: str) -> OutputError:
    return OutputError(f"{name}: is damaged. Choose another folder{flag('output')} to compute everything again.")
