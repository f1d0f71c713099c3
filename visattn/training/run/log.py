"""What a run tells of itself: `log.jsonl`, a row as it happens, and tables made from it.

A row of the log holds nothing that another run of the same configuration would not give too; how long things took is in `speed.jsonl`.
So a run that was interrupted, and goes on by cutting the log back to its last checkpoint, ends with the same bytes as one that was not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from visattn._support.checks import printable, shown
from visattn._support.files import open_own, read_own, write_whole
from visattn._support.tables import to_csv
from visattn.errors import CheckpointError, OutputError, ResourceError

Row = dict[str, Any]


class Log:
    """Rows in a file, one line each."""

    def __init__(self, path: Path) -> None:
        """Nothing is read or written yet; the file is made when the first row comes."""
        self.path = path

    def check(self, length: int | None, *needed: str) -> int:
        """Return how many bytes of the file stay when a run goes on; see `cut`.

        Args:
            length: Bytes that should stay; None: all.
            needed: Names under which each row must have a number, 0 or more.

        Raises:
            CheckpointError: If a row that stays is no object of numbers.
            OutputError: If the file cannot be read.
        """
        content = self._content()
        whole = content.rfind(b"\n") + 1  # a kill may have cut the last row
        stays = whole if length is None else min(whole, length)
        for number, line in enumerate(content[:stays].splitlines(), start=1):
            row = _parsed(line)
            if (
                not isinstance(row, dict)
                or not all(map(_numeric, row.values()))
                or not all(_counted(row.get(key)) for key in needed)
            ):
                raise CheckpointError(
                    f"{printable(str(self.path))}, line {number}: must be an object of numbers with {', '.join(needed)}, got "
                    f"{shown(row)}; restore the file, or start again in another folder (-o/--output)."
                )
        return stays

    def cut(self, length: int) -> None:
        """Keep only so many bytes.

        Raises:
            ResourceError: If the file can no longer be written.
        """
        if self.length > length:
            self._write(lambda descriptor: os.ftruncate(descriptor, length), os.O_WRONLY)

    def add(self, **row: Any) -> None:  # noqa: ANN401
        """One more row.

        Raises:
            ResourceError: If the disk is full, or the folder can no longer be written.
        """
        line = json.dumps(row).encode() + b"\n"
        self._write(lambda descriptor: os.write(descriptor, line), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _write(self, act: Callable[[int], object], flags: int) -> None:
        """Do something with the open file.

        Raises:
            ResourceError: If that fails.
        """
        try:
            descriptor = open_own(self.path, flags)
            try:
                act(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            cause = (error.strerror or str(error)).lower()
            raise ResourceError(
                f"{printable(str(self.path))}: cannot be written ({cause}); mend that, and run the same command again to go on."
            ) from error

    @property
    def length(self) -> int:
        """Bytes."""
        return len(self._content())

    def rows(self) -> list[Row]:
        """All rows; a last line that a kill cut short is left out."""
        rows = map(_parsed, self._content().splitlines())
        return [row for row in rows if isinstance(row, dict)]

    def _content(self) -> bytes:
        """What is in the file.

        Raises:
            OutputError: If it is there and cannot be read.
        """
        try:
            return read_own(self.path)
        except FileNotFoundError:
            return b""
        except OSError as error:
            cause = (error.strerror or str(error)).lower()
            raise OutputError(
                f"{printable(str(self.path))}: cannot be read ({cause}); choose another folder (-o/--output)"
            ) from error

    def to_csv(self, path: Path) -> Path:
        """All rows as one table, an empty cell where a row has no such value."""
        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        return write_whole(path, to_csv([{name: row.get(name) for name in names} for row in rows]).encode())


def _parsed(line: bytes) -> Any:  # noqa: ANN401 - of JSON
    """Return what a line holds; None if it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _numeric(value: object) -> bool:
    """Whether a value is one that a row of the log may have; a mean of no losses is None, one that diverged infinite."""
    return value is None or type(value) is float or (type(value) is int and abs(value) < 2**63)


def _counted(value: object) -> bool:
    """Whether a value tells how many or how long."""
    return type(value) in (int, float) and 0 <= value < 2**53  # type: ignore[operator] # a number
