"""Kept results of proofs: one JSON file for each, with the files that the proof read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from evidence.tree import Tree, changed


@dataclass(frozen=True)
class Result:
    """Result of a proof.

    Attributes:
        name: Name of the proof.
        command: Its command.
        status: Exit status.
        minutes: Minutes that it took.
        commit: Commit of the checkout, with `+` if files were changed.
        machine: Processor.
        libraries: Versions of Python and of the libraries that decide numbers and pictures.
        day: Day on which it ended.
        output: Its last lines.
        read: Digest of each file of the project that it read, and of the names in each folder that it listed.
    """

    name: str
    command: str
    status: int
    minutes: float
    commit: str
    machine: str
    libraries: Mapping[str, str]
    day: str
    output: tuple[str, ...]
    read: Mapping[str, str]

    def state(self, command: str, tree: Tree, libraries: Mapping[str, str]) -> str:
        """Return `ok`, or why the proof must run: it failed, or its command, a library or a file that it read is another."""
        if self.status:
            return f"failed (status {self.status})"
        if self.command != command:
            return "another command"
        if others := [name for name in {**self.libraries, **libraries} if self.libraries.get(name) != libraries.get(name)]:
            return f"another {others[0]}"
        other = changed(self.read, tree)
        return f"changed: {other[0]}{f' and {len(other) - 1} more' if other[1:] else ''}" if other else "ok"


def file_of(folder: Path, name: str) -> Path:
    """Return the file that keeps the result of a proof."""
    return folder / f"{name.replace(' ', '_')}.json"


def kept(folder: Path, name: str) -> Result | None:
    """Return the kept result of a proof, or None."""
    try:
        facts = json.loads(file_of(folder, name).read_text(encoding="utf-8"))
        return Result(**facts | {"output": tuple(facts["output"])})
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def keep(folder: Path, result: Result) -> None:
    """Keep a result: the file is complete, or the former one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = file_of(folder, result.name)
    spare = file.with_suffix(f".{os.getpid()}.tmp")
    spare.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    spare.replace(file)
