"""Log of a run: `log.jsonl`, to which rows are appended during training, and a table made from it.

The log contains only values that are the same in every run with the same settings. Durations are written to `speed.jsonl`. A resumed
run truncates the log to its last checkpoint. So at the end its log has the same bytes as that of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from visattn._support.checks import printable, shown
from visattn._support.json_files import decoded
from visattn._support.language import flag
from visattn._support.tables import to_csv
from visattn._support.untrusted import open_own, read_own
from visattn._support.whole_files import write_whole
from visattn.errors import CheckpointError, OutputError, ResourceError

Row = dict[str, Any]
_Value = (
    Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | None
)  # the mean of no losses; a loss that diverged is not finite


class Log:
    """File with one JSON object per line."""

    def __init__(self, path: Path) -> None:
        """Set the path, without reading or writing. The first row creates the file."""
        self.path = path

    def check(self, length: int | None, *needed: str) -> int:
        """Validate the rows to keep when a run is resumed. Return their length in bytes, for `cut`.

        Args:
            length: Number of bytes to keep; None: all complete rows.
            needed: Keys that each row must have, with numbers of 0 or more.

        Raises:
            CheckpointError: If a row to keep is not an object of numbers with these keys.
            OutputError: If the file cannot be read.
        """
        content = self._content()
        whole = content.rfind(b"\n") + 1  # the last row may be incomplete after a kill
        stays = whole if length is None else min(whole, length)
        for number, line in enumerate(content[:stays].splitlines(), start=1):
            row = _parsed(line)
            if row is None or not all(_counted(row.get(key)) for key in needed):
                raise CheckpointError(
                    f"{printable(str(self.path))}, line {number}: must be an object of numbers with {', '.join(needed)}, got "
                    f"{shown(line.decode(errors='replace'))}. Restore the file, or start again in another folder{flag('output')}."
                )
        return stays

    def cut(self, length: int) -> None:
        """Truncate the file to a length in bytes.

        Raises:
            ResourceError: If the file can no longer be written.
        """
        if self.length > length:
            self._write(lambda descriptor: os.ftruncate(descriptor, length), os.O_WRONLY)

    def add(self, **row: Any) -> None:  # noqa: ANN401
        """Append a row.

        Raises:
            ResourceError: If the disk is full, or the folder can no longer be written.
        """
        line = json.dumps(row).encode() + b"\n"
        self._write(lambda descriptor: os.write(descriptor, line), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _write(self, act: Callable[[int], object], flags: int) -> None:
        """Open the file and call `act` with its descriptor.

        Raises:
            ResourceError: If the file cannot be opened or `act` fails.
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
                f"{printable(str(self.path))}: cannot be written ({cause}). Fix this and run the same command again to resume."
            ) from error

    @property
    def length(self) -> int:
        """Length of the file in bytes."""
        return len(self._content())

    def rows(self) -> list[Row]:
        """Read all rows. An incomplete last line, left by a kill, is ignored."""
        return [row for row in map(_parsed, self._content().splitlines()) if row is not None]

    def _content(self) -> bytes:
        """Read the file. Return no bytes if it does not exist.

        Raises:
            OutputError: If the file exists but cannot be read.
        """
        try:
            return read_own(self.path)
        except FileNotFoundError:
            return b""
        except OSError as error:
            cause = (error.strerror or str(error)).lower()
            raise OutputError(
                f"{printable(str(self.path))}: cannot be read ({cause}); choose another folder{flag('output')}"
            ) from error

    def to_csv(self, path: Path) -> Path:
        """Write all rows as one CSV table, with an empty cell for each missing value. Return its path."""
        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        return write_whole(path, to_csv([{name: row.get(name) for name in names} for row in rows]).encode())


def _parsed(line: bytes) -> Row | None:
    """Parse a line of JSON. Return None if it is no object of numbers."""
    try:
        return decoded(line, dict[str, _Value], lax=True)
    except ValueError:
        return None


def _counted(value: object) -> bool:
    """Check whether a value is a valid count or duration."""
    return type(value) in (int, float) and 0 <= value < 2**53  # type: ignore[operator] # a number
