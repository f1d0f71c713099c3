"""Steps of the site's build that mkdocs calls: files from outside of `docs`, links between them, pages of tables, and checks."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from checks import faults, words
from live import FOLDER as LIVE, TITLES
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from notebooks import page_of_notebook
from places import ROOT, SOURCES, linked_files, place_of, with_links_of_the_site
from reference import pages as pages_of_reference
from tables import page_of_source, page_of_table

_LIVE = re.compile(r"<!-- live (\w+) -->")
_STATIC = Path(__file__).parent / "static"
_OUTSIDE = "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "assets/favicon.svg"
MOST_WORDS = 45_000
MOST_BYTES = 40e6
_log = logging.getLogger("mkdocs.hooks.website")
_sources: dict[str, Path] = {}  # source of a page on the site -> file of the project
_words: dict[str, int] = {}  # of each page that the project's authors wrote


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to, wherever it lies in the project."""
    for file in list(files):
        if file.abs_src_path and file.src_uri.endswith(".md"):
            _sources[file.src_uri] = Path(file.abs_src_path)
    waiting = [*_sources.values(), *(ROOT / name for name in _OUTSIDE)]
    seen: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        if file.suffix == ".md":
            waiting += linked_files(file)
        _add(file, files, config)
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        _add_notebook(path, files, config)
    for path in sorted(LIVE.glob("*.html")):
        _put(files, File.generated(config, f"live/{path.name}", abs_src_path=str(path)))
    for path in sorted(_STATIC.iterdir()):
        _put(files, File.generated(config, f"assets/site/{path.name}", abs_src_path=str(path)))
    reference = pages_of_reference()
    for uri, text in reference.items():
        _put(files, File.generated(config, uri, content=text, inclusion=InclusionLevel.INCLUDED))
    (chapter,) = (part for part in config.nav or () if "Reference" in part)
    chapter["Reference"] = ["reference/index.md", *(uri for uri in reference if uri != "reference/index.md")]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the project into links between pages."""
    source = _sources.get(page.file.src_uri)
    if source is None:
        return markdown
    _words[page.file.src_uri] = words(markdown)
    return _LIVE.sub(_frame, with_links_of_the_site(markdown, source))


def _frame(mark: re.Match[str]) -> str:
    """Return the frame of a live page, with a link to it."""
    name, title = mark[1], TITLES[mark[1]]
    frame = f'<iframe class="live" src="live/{name}.html" title="{title}" loading="lazy"></iframe>'
    return f"## {title}\n\n{frame}\n\n[Alone](live/{name}.html)"


def on_post_build(config: MkDocsConfig) -> None:
    """Check the finished site, and print its size."""
    site = Path(config.site_dir)
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    total = sum(_words.values())
    print("\n".join(f"{count:6,} words  {uri}" for uri, count in sorted(_words.items(), key=lambda one: one[1])))
    print(f"{total:6,} words of prose in {len(_words)} pages; {size / 1e6:.1f} MB")
    for fault in faults(site):
        _log.warning(fault)
    if total > MOST_WORDS:
        _log.warning(f"the pages have {total:,} words, more than {MOST_WORDS:,}")
    if size > MOST_BYTES:
        _log.warning(f"the site has {size / 1e6:.0f} MB, more than {MOST_BYTES / 1e6:.0f}")


def _add(file: Path, files: Files, config: MkDocsConfig) -> None:
    uri, shown = place_of(file)
    if shown:
        made = page_of_source(file, str(file.relative_to(ROOT))) if file.suffix in SOURCES else page_of_table(file)
        _put(files, File.generated(config, uri, content=made))
        uri = str(Path(uri).with_name(file.name))
    elif file.suffix == ".md":
        _sources[uri] = file
    if files.get_file_from_path(uri) is None:
        _put(files, File.generated(config, uri, abs_src_path=str(file)))


def _add_notebook(path: Path, files: Files, config: MkDocsConfig) -> None:
    """Add the page of a notebook with its pictures, and its file for download."""
    made, folder = page_of_notebook(path), "notebooks"
    _sources[f"{folder}/{path.stem}.md"] = path
    _put(files, File.generated(config, f"{folder}/{path.stem}.md", content=made.markdown))
    for name, content in made.pictures.items():
        _put(files, File.generated(config, f"{folder}/{name}", content=content))


def _put(files: Files, file: File) -> None:
    files.append(file)
