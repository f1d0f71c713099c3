"""The page: markup, style, script and payload in one HTML file."""

from __future__ import annotations

import base64
import gzip
import html
import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from visattn._support.checks import printable
from visattn.errors import OptionError
from visattn.viewer.payload import Payload, names_of

if TYPE_CHECKING:
    from visattn.studies import Study

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_LEVEL = 6  # of gzip
MAX_MB = 60.0


def html_of(study: Study, *, max_mb: float = MAX_MB, layers: str = "*") -> str:
    """Return a study as an HTML page. It refers to nothing outside of itself.

    Args:
        study: The study.
        max_mb: Largest size of the page in MB.
        layers: Glob of the names of the layers whose attention is in the page.

    Returns:
        The page.

    Raises:
        OptionError: If the study has nothing to show, or the page exceeds `max_mb`.
    """
    payload = Payload(study, layers)
    data = base64.b64encode(gzip.compress(payload.data, _LEVEL, mtime=0)).decode()
    facts = json.dumps(payload.facts, allow_nan=False).replace("<", "\\u003c")
    title = html.escape(printable(names_of(study.views))[:200])
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{_built('viewer.css')}</style>\n</head>\n<body>\n<noscript>This page needs JavaScript.</noscript>\n"
        f'<script type="application/json" id="facts">{facts}</script>\n'
        f'<script type="application/octet-stream" id="data">{data}</script>\n'
        f"<script>{_built('viewer.js')}</script>\n</body>\n</html>\n"
    )
    if len(page) > max_mb * 1e6:
        raise OptionError(
            f"the page takes {len(page) / 1e6:.1f} MB, more than {max_mb:g}. Pass fewer layers "
            "(--layers), a smaller img_size (--img-size), or a larger max_mb (--max-mb)."
        )
    return page


def framed(page: str, height: int) -> str:
    """Return a page in a frame for notebooks; the frame may run its script and save files, and reaches nothing else."""
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{html.escape(page)}" title="visattn viewer" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
    )


@cache
def _built(name: str) -> str:
    return files("visattn.viewer").joinpath("built", name).read_text(encoding="utf-8")
