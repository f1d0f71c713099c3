"""Functions that write tables into docs pages, between the marks `<!-- NAME -->` and `<!-- end -->`, and large tables into files."""

from __future__ import annotations

import csv
import io
import re
import sys
from pathlib import Path

_FOLD = re.compile(r"<details><summary>(.*?)</summary>\n\n((?:\|.*\n)+)\n</details>\n")


def folded(summary: str, table: str) -> str:
    """Wrap a table in a fold with a summary line."""
    return f"<details><summary>{summary}</summary>\n\n{table}\n</details>\n"


def write_section(docs: Path, name: str, text: str, *, into_files: bool = False) -> None:
    """Write a text between its marks in a page, and print a note.

    Args:
        docs: The page.
        name: Name of the marks.
        text: Markdown.
        into_files: Write the tables in folds into files beside the page, and links in their place: see `with_files`.
    """
    if into_files:
        text = with_files(docs, name, text)
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


def section_of(docs: Path, name: str) -> str:
    """Return the text between the marks of a name in a page."""
    return docs.read_text(encoding="utf-8").split(f"<!-- {name} -->\n", 1)[1].split("<!-- end -->", 1)[0]


def write_table(file: Path, table: str) -> None:
    """Write a Markdown table into a file of comma-separated values."""
    head, _, *rows = table.splitlines()
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_cells(line) for line in (head, *rows))
    file.parent.mkdir(exist_ok=True)
    file.write_text(text.getvalue(), encoding="utf-8")


def read_table(file: Path) -> str:
    """Return the Markdown table that `write_table` wrote into a file."""
    with file.open(newline="", encoding="utf-8") as lines:
        head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in csv.reader(lines))
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def with_files(docs: Path, name: str, text: str) -> str:
    """Write the tables in folds into files beside a page, `PAGE/NAME_SUMMARY.csv`; return the text with links in their place."""
    return _FOLD.sub(lambda fold: _linked(docs, name, fold[1], fold[2]), text)


def _linked(docs: Path, name: str, summary: str, table: str) -> str:
    """Write a Markdown table into a file; return a link to it, as an item of a list."""
    words = re.sub(r"\d+", "", summary.partition(":")[0].partition(",")[0])  # counts change, names of files do not
    file = docs.with_suffix("") / f"{'_'.join(f'{name} {words}'.lower().split())}.csv"
    write_table(file, table)
    return f"- [{summary}]({docs.stem}/{file.name})\n"


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
