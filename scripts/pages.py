"""Tables that commands write into pages, between marks: `<!-- NAME -->` and the next `<!-- end -->`."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def write_section(docs: Path, name: str, text: str) -> None:
    """Put a text between its marks, and say so."""
    docs.write_text(with_section(docs.read_text(encoding="utf-8"), name, text, docs.name), encoding="utf-8")
    print(f"wrote {name} to {docs.name}", file=sys.stderr)


def with_section(page: str, name: str, text: str, title: str) -> str:
    """The page with the text between the marks of a name."""
    made, count = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda found: f"{found[1]}\n{text}\n{found[2]}", page, flags=re.DOTALL
    )
    if count != 1:
        sys.exit(f"{title}: must hold the marks <!-- {name} --> and <!-- end --> once")
    return made
