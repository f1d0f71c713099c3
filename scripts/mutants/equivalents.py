"""Mutants that are known to do the same as the source, each with a reason, in `mutation_equivalents.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path

from mutants.drawing import Mutant

FILE = Path(__file__).parents[1] / "mutation_equivalents.toml"
_KEYS = {"file", "code", "change", "reason"}


class Equivalents:
    """The mutants of a file, recognized by file, code and change, so that lines above them may move."""

    def __init__(self, file: Path = FILE) -> None:
        """Read the file.

        Raises:
            ValueError: An entry lacks a key, or has an empty reason.
        """
        self._entries = tomllib.loads(file.read_text(encoding="utf-8")).get("mutant", [])
        for entry in self._entries:
            if set(entry) != _KEYS or not entry["reason"].strip():
                raise ValueError(f"an entry of {file} must have {', '.join(sorted(_KEYS))}, got {entry}")
        self._known = {(entry["file"], entry["code"], _plain(entry["change"])) for entry in self._entries}

    def __contains__(self, mutant: Mutant) -> bool:
        """Return whether a mutant is listed."""
        return (mutant.place.file, mutant.code, _plain(mutant.change)) in self._known

    def outdated(self, root: Path) -> list[str]:
        """Return the entries whose code is no line of their file any more."""
        return [
            f"{entry['file']}: {entry['code']}"
            for entry in self._entries
            if not (file := root / entry["file"]).exists()
            or _plain(entry["code"]) not in _plain(file.read_text(encoding="utf-8"))
        ]


def _plain(text: str) -> str:
    """Return a text without spaces, of which cosmic-ray adds some."""
    return "".join(text.split())
