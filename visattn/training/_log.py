"""What a run tells of itself: `log.jsonl`, a row as it happens, and tables made from it.

A row of the log holds nothing that another run of the same configuration would not give too; how long things took is in `speed.jsonl`.
So a run that was interrupted, and goes on by cutting the log back to its last checkpoint, ends with the same bytes as one that was not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from visattn._checks import printable
from visattn._files import write_whole
from visattn._tables import to_csv
from visattn.errors import ResourceError

Row = dict[str, Any]


class Log:
    """Rows in a file, one line each."""

    def __init__(self, path: Path, length: int | None = None) -> None:
        """Go on with a file.

        Args:
            path: The file; made when the first row comes.
            length: Bytes that stay; None: all.
        """
        self.path = path
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1  # a kill may have cut the last row
            stays = whole if length is None else min(whole, length)
            if stays < len(content):
                os.truncate(path, stays)

    def add(self, **row: Any) -> None:  # noqa: ANN401
        """One more row.

        Raises:
            ResourceError: If the disk is full, or the folder can no longer be written.
        """
        try:
            with self.path.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
        except OSError as error:
            cause = (error.strerror or str(error)).lower()
            raise ResourceError(
                f"{printable(str(self.path))}: cannot be written ({cause}); mend that, and run the same command again to go on."
            ) from error

    @property
    def length(self) -> int:
        """Bytes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def rows(self) -> list[Row]:
        """All rows; a last line that a kill cut short is left out."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def to_csv(self, path: Path) -> Path:
        """All rows as one table, an empty cell where a row has no such value."""
        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        return write_whole(path, to_csv([{name: row.get(name) for name in names} for row in rows]).encode())
