"""Where a file of the project lies on the site: pages of `docs` at the root, the README first, others under their own path."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"^(```)(\w*)[^\n]*\n.*?^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
SOURCES = (".py", ".toml")  # a link to one of them leads to a page that shows it


class Place(NamedTuple):
    """Place of a file.

    Attributes:
        uri: Path of the page's or file's source on the site.
        shown: Whether the file itself is no page, and a page of it is made.
    """

    uri: str
    shown: bool = False


def place_of(file: Path) -> Place:
    """Return where a file of the project lies on the site."""
    path = file.relative_to(ROOT)
    if path.parts[0] == "docs":
        path = path.relative_to("docs")
    elif path.name == "README.md" and len(path.parts) == 1:
        return Place("README.md")
    elif len(path.parts) == 1:
        path = Path("project", path)  # not beside the pages of docs, from which some differ by capital letters alone
    if path.suffix == ".csv" or path.suffix in SOURCES:
        return Place(f"{path.with_suffix('')}_{path.suffix[1:]}.md", shown=True)
    return Place(path.with_suffix(".md").as_posix() if path.suffix == ".ipynb" else path.as_posix())


def linked_files(page: Path) -> list[Path]:
    """Return the files of the project that a page links to."""
    return [target for _, target, _ in _links(page.read_text(encoding="utf-8"), page)]


def with_links_of_the_site(text: str, page: Path) -> str:
    """Return a page's Markdown with links between files of the project as links between pages of the site."""
    here = Path(place_of(page).uri).parent
    for link, target, anchor in _links(text, page):
        new = os.path.relpath(place_of(target).uri, here)
        text = text.replace(f"]({link})", f"]({new}{anchor})")
    return _FENCE.sub(lambda block: block[0].replace(block[0].split("\n")[0], f"```{block[2]}", 1), text)


def _links(text: str, page: Path) -> list[tuple[str, Path, str]]:
    """Return links to files of the project: as written, the file, and the anchor."""
    found = []
    for _, link, _ in _LINK.findall(_CODE.sub("", _FENCE.sub("", text))):
        target, mark, anchor = link.partition("#")
        file = (page.parent / target).resolve()
        if target and "://" not in target and file.is_file() and file.is_relative_to(ROOT):
            found.append((link, file, mark + anchor))
    return found
