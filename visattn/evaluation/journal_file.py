"""Journals: a first line with the settings, then a line for each result as soon as it is known, so that a run can go on later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from visattn._support.checks import printable
from visattn._support.json_files import decoded
from visattn._support.whole_files import refusal
from visattn.errors import OutputError

Line = TypeVar("Line", bound=msgspec.Struct)


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    """First line: what the journal is of, and what decides its results."""

    journal: str
    settings: dict[str, Any]


class JournalFile(Generic[Line]):
    """Results of an earlier run, and the file that new ones are added to.

    Attributes:
        lines: The results so far.
    """

    def __init__(self, path: Path | None, of: str, settings: Mapping[str, Any], kind: type[Line], *, anew: bool = False) -> None:
        """Read what an earlier run has written.

        Args:
            path: The file; None: nothing is kept.
            of: What the journal is of, such as `evaluation`.
            settings: What decides the results, as JSON.
            kind: Type of a line.
            anew: Whether to forget an earlier run.

        Raises:
            OutputError: If the file is no such journal, is of a run with other settings, or cannot be read or written.
        """
        self._path, self._of, self.lines = path, of, list[Line]()
        if path is None:
            return
        known = decoded(msgspec.json.encode(dict(settings)), dict[str, Any], "settings")  # as they are read from a file
        try:
            content = path.read_bytes() if path.exists() and not anew else b""
            whole = content[: content.rfind(b"\n") + 1]  # the last line may be torn
            head = msgspec.json.encode(_Head(of, known))
            if content and not whole and not head.startswith(content):
                raise OutputError(
                    f"{printable(str(path))}: not a journal of this kind (its first line is another); pass another file"
                )
            if whole and self._goes_on(path, whole.splitlines(), known, kind):
                with path.open("r+b") as file:
                    file.truncate(len(whole))
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(head + b"\n")
        except OutputError:  # which is an OSError, too
            raise
        except OSError as error:
            refused = refusal(error, path)
            raise refused from error
        except ValueError as error:
            raise OutputError(f"{printable(str(path))}: not a journal of this kind ({error}); pass another file") from error

    def _goes_on(self, path: Path, lines: list[bytes], settings: dict[str, Any], kind: type[Line]) -> bool:
        """Read the results of an earlier run; return False if it has none, and other settings."""
        head = decoded(lines[0], _Head, "the first line")
        if head.journal != self._of:
            raise ValueError(f"it is of {head.journal:.40}")
        other = [name for name in {**head.settings, **settings} if head.settings.get(name) != settings.get(name)]
        if other and not lines[1:]:
            return False
        if other:
            told = "; ".join(f"{name} was {head.settings.get(name)}, now {settings.get(name)}" for name in other[:3])
            raise OutputError(f"{printable(str(path))}: of a run with other settings ({told:.300}); pass another file")
        self.lines += [decoded(content, kind, f"line {number}") for number, content in enumerate(lines[1:], 2)]
        return True

    def add(self, line: Line) -> Line:
        """Keep a result, and return it.

        Raises:
            OutputError: If the file cannot be written.
        """
        self.lines.append(line)
        if self._path is not None:
            try:
                with self._path.open("ab") as file:
                    file.write(msgspec.json.encode(line) + b"\n")
            except OSError as error:
                refused = refusal(error, self._path)
                raise refused from error
        return line
