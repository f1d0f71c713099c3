"""Table of messages about models, photos, weights, data, maps and captures, and which of them a run of the tests reached.

    VISATTN_MESSAGES=/tmp/messages make test
    python scripts/messages.py /tmp/messages

A message is a place in the source that makes one of these errors. Fails if more than a tenth was not reached.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "visattn"
KINDS = (
    *(
        "ModelError",
        "UnsupportedModel",
        "WeightsError",
        "CheckpointError",
        "TrainingError",
        "CaptureError",
        "NoAttentionCaptured",
    ),
    *("LayoutError", "ImageError", "DataError", "MapError"),
)
MOST = 0.1  # largest share that may not be reached


class Place(NamedTuple):
    """Expression that makes an error."""

    file: str
    first: int
    last: int
    kind: str
    text: str


def places() -> list[Place]:
    """Return all expressions of the package that make such an error."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                text = " ".join((ast.get_source_segment(source, node) or "").split())
                found.append(
                    Place(str(path.relative_to(PACKAGE)), node.lineno, node.end_lineno or node.lineno, node.func.id, text)
                )
    return found


def reached(folder: Path) -> dict[str, set[int]]:
    """Return the lines of each file at which an error was made."""
    lines: dict[str, set[int]] = {}
    for path in folder.glob("*.txt"):
        for text in path.read_text().split():
            file, _, line = text.rpartition(":")
            lines.setdefault(file, set()).add(int(line))
    return lines


def main() -> int:
    """Print the table; return 1 if too many messages were not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    lines = reached(parser.parse_args().folder)
    every = places()
    missing = [one for one in every if not any(one.first <= line <= one.last for line in lines.get(one.file, ()))]
    counts, lacks = Counter(one.kind for one in every), Counter(one.kind for one in missing)
    for kind in KINDS:
        print(f"{kind:20} {counts[kind] - lacks[kind]:4} of {counts[kind]:4}")
    for one in missing:
        print(f"not reached: {one.file}:{one.first}: {one.text[:200]}")
    share = len(missing) / len(every)
    print(f"{len(every) - len(missing)} of {len(every)} messages are reached; {share:.1%} are not (at most {MOST:.0%})")
    return int(share > MOST)


if __name__ == "__main__":
    sys.exit(main())
