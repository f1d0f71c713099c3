"""Functions that write tables into docs pages, between the marks `<!-- NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def folded(summary: str, table: str) -> str:
    """Wrap a table in a fold with a summary line."""
    return f"<details><summary>{summary}</summary>\n\n{table}\n</details>\n"


def write_section(docs: Path, name: str, text: str) -> None:
    """Write a text between its marks in a page, and print a note."""
    docs.write_text(with_section(docs.read_text(encoding="utf-8"), name, text, docs.name), encoding="utf-8")
    print(f"wrote {name} to {docs.name}", file=sys.stderr)


def with_section(page: str, name: str, text: str, title: str) -> str:
    """Return the page with the text between the marks of a name."""
    made, count = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda found: f"{found[1]}\n{text}\n{found[2]}", page, flags=re.DOTALL
    )
    if count != 1:
        sys.exit(f"{title}: must contain the marks <!-- {name} --> and <!-- end --> exactly once")
    return made
