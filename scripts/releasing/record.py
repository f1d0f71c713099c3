"""What was tried of a commit, kept in a file, so that an interrupted release goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Outcome(NamedTuple):
    """What a command did.

    Attributes:
        name: What is shown for it.
        status: Exit status.
        seconds: Time that it took.
        last: Its last line.
    """

    name: str
    status: int
    seconds: float
    last: str


class Record:
    """Outcomes of each part of a release, in a file of JSON."""

    def __init__(self, file: Path, commit: str) -> None:
        """Read what is kept; that of another commit is forgotten."""
        self._file = file
        self._kept = {"commit": commit, "files": {}, "parts": {}}
        if file.exists() and (kept := json.loads(file.read_text(encoding="utf-8")))["commit"] == commit:
            self._kept = kept

    @property
    def files(self) -> dict[str, str]:
        """Names of the distributions with their sha256."""
        return self._kept["files"]  # type: ignore[return-value]

    def built(self, files: dict[str, str]) -> None:
        """Keep the names of new distributions, and forget what was tried with others."""
        self._kept |= {"files": files, "parts": {}}
        self._write()

    def keep(self, part: str, outcomes: Sequence[Outcome]) -> None:
        """Keep what the commands of a part did."""
        self._kept["parts"][part] = outcomes  # type: ignore[index]
        self._write()

    def outcomes(self, part: str) -> list[Outcome]:
        """Return what the commands of a part did; nothing if it did not run."""
        return [Outcome(*one) for one in self._kept["parts"].get(part, [])]  # type: ignore[attr-defined]

    def passed(self, part: str) -> bool:
        """Return whether a part ran and nothing failed in it."""
        found = self.outcomes(part)
        return bool(found) and not failed(found)

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._kept, indent=1), encoding="utf-8")


def failed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return those that failed."""
    return [one for one in outcomes if one.status]
