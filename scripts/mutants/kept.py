"""Files of JSON lines that grow as results come; a line that a killed run left incomplete is skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def entries(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a file, which may not exist."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").split("\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


def appended(file: Path, entry: Mapping[str, Any]) -> None:
    """Append an entry; it begins with a line of its own, so that what an incomplete one left does not spoil it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as handle:
        handle.write(f"\n{json.dumps(entry)}")
