"""What the finished site must hold: every link of its pages leads somewhere, nothing is loaded from elsewhere, and it is short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
_NO_LOAD = {"canonical", "next", "prev", "edit"}  # relations of a <link> that is not loaded


class _Links(HTMLParser):
    """Collects what a page loads, what it links to, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = {""}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif (name := _LOADS.get(tag)) in given and given.get("rel") not in _NO_LOAD:
            self.loads.append(given[str(name)])


def faults(site: Path) -> Iterator[str]:
    """Yield each broken link and each file that would come from the network."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html" and not _is_live(path, site)}
    for path, page in pages.items():
        where = path.relative_to(site)
        yield from (f"{where}: loads {one} from the network" for one in page.loads if urlsplit(one).netloc)
        for link in {*page.loads, *page.links}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{where}: links to {link}, which is not there"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{where}: links to {link}, whose anchor is not there"


def words(markdown: str) -> int:
    """Count the words of a page's prose and tables, code left out."""
    text = re.sub(r"^(```|~~~~).*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
    return len(re.findall(r"[^\W_][\w'-]*", re.sub(r"<[^>]*>", "", text)))


def _is_live(path: Path, site: Path) -> bool:
    return path.is_relative_to(site / "live")


def _read(path: Path) -> _Links:
    page = _Links()
    page.feed(path.read_text(encoding="utf-8"))
    return page
