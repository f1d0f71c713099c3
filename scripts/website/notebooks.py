"""Notebooks as pages: their cells, and the outputs of a run that is kept until the notebook or the library changes."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbclient
import nbformat
from places import ROOT

KEPT = ROOT / "build" / "notebooks"
SECONDS = 300
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_PICTURES = {"image/png": "png", "image/jpeg": "jpg"}


class NotebookPage(NamedTuple):
    """A notebook for the site.

    Attributes:
        markdown: Text of the page.
        pictures: Its pictures by file name.
    """

    markdown: str
    pictures: dict[str, bytes]


def page_of_notebook(file: Path) -> NotebookPage:
    """Return the page of a notebook, run if no run of it is kept."""
    parts, pictures = [f"[Open the notebook]({file.name}): download it, or open it on Colab or Kaggle."], dict[str, bytes]()
    title, *cells = executed(file).cells
    for number, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for shown in _outputs(cell.outputs):
            if isinstance(shown, str):
                parts.append(shown)
                continue
            kind, content = shown
            name = f"{file.stem}_{number}_{len(pictures)}.{kind}"
            pictures[name] = content
            parts.append(f"![Output of the cell]({name})")
    return NotebookPage("\n\n".join([title.source, *parts]) + "\n", pictures)


def executed(file: Path) -> Any:  # noqa: ANN401 - nbformat has no types
    """Return a notebook with its outputs."""
    digest = hashlib.sha256()
    for path in (file, *sorted(ROOT.glob("visattn/**/*.py"))):
        digest.update(path.read_bytes())
    kept = KEPT / f"{file.stem}-{digest.hexdigest()[:16]}.ipynb"
    if kept.exists():
        return nbformat.read(kept, 4)
    notebook = nbformat.read(file, 4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": folder}}).execute()
    KEPT.mkdir(parents=True, exist_ok=True)
    for old in KEPT.glob(f"{file.stem}-*.ipynb"):
        old.unlink()
    nbformat.write(notebook, kept)
    return notebook


def _outputs(outputs: list[Any]) -> Iterator[str | tuple[str, bytes]]:
    """Yield text and HTML as Markdown, and pictures with their format."""
    from base64 import b64decode

    for output in outputs:
        if output.output_type == "stream":
            yield f"```text\n{_ESCAPES.sub('', output.text).rstrip()}\n```"
            continue
        data = output.data
        if picture := next((kind for kind in _PICTURES if kind in data), None):
            yield _PICTURES[picture], b64decode(data[picture])
        elif "text/html" in data:
            yield f'<div class="output">{data["text/html"]}</div>'
        else:
            yield f"```text\n{data['text/plain']}\n```"
