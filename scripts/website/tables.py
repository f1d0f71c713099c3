"""Pages of files that the docs link to: a table that readers sort and filter for values, the text for programs."""

from __future__ import annotations

import csv
import re
from html import escape
from pathlib import Path

_HEAD = "---\nsearch:\n  exclude: true\n---\n"
_CODE = re.compile(r"`([^`]*)`")
_LANGUAGES = {".py": "python", ".toml": "toml"}


def page_of_table(file: Path) -> str:
    """Return the Markdown of a page with a sortable table of comma-separated values."""
    with file.open(newline="", encoding="utf-8") as lines:
        head, *rows = csv.reader(lines)
    title = file.stem.replace("_", " ").capitalize()
    names = "".join(f'<th scope="col"><button type="button">{_cell(name)}</button></th>' for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    note = f"{len(rows)} rows. Click the head of a column to sort by it. [The file]({file.name})"
    table = f'<table class="sortable"><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>'
    region = f'<div class="table-scroll" tabindex="0" role="region" aria-label="{title}">{table}</div>'
    return f"{_HEAD}# {title}\n\n{note}\n\n{region}\n"


def page_of_source(file: Path, path: str) -> str:
    """Return the Markdown of a page that shows a program."""
    text = file.read_text(encoding="utf-8").rstrip()
    return f"{_HEAD}# {path}\n\n~~~~{_LANGUAGES[file.suffix]}\n{text}\n~~~~\n"


def _cell(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text))
