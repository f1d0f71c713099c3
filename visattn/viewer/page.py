"""The page: markup, style, script and payload in one HTML file."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypedDict

from visattn._support.checks import printable
from visattn._support.typed import typed
from visattn.viewer.payload import Payload, check_size

if TYPE_CHECKING:
    from visattn.studies import Study

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
MAX_MB = 60.0


class PageOptions(TypedDict, total=False):
    """Options of `html_of`."""

    max_mb: float
    layers: str
    heads: Sequence[int] | None


@typed(but=("study",))
def html_of(study: Study, *, max_mb: float = MAX_MB, layers: str = "*", heads: Sequence[int] | None = None) -> str:
    """Return a study as an HTML page. It refers to nothing outside of itself.

    Args:
        study: The study.
        max_mb: Largest size of the page in MB.
        layers: Glob of the names of the layers whose attention is in the page.
        heads: Numbers of the heads that are in the page; None: all. A layer that has none of them is left out.

    Returns:
        The page.

    Raises:
        OptionError: If the study has nothing to show, no layer has such a name or such heads, or the page exceeds `max_mb`.
    """
    payload = Payload(study, layers=layers, heads=heads, max_mb=max_mb)
    title = " | ".join(view["title"] for view in payload.facts["views"])
    return written(title, payload.facts, payload.data, ("viewer.css",), "viewer.js", max_mb)


def written(title: str, facts: dict[str, Any], data: str, styles: Sequence[str], script: str, max_mb: float) -> str:
    """Return a page with built styles and a built script.

    Args:
        title: Title of the page.
        facts: Plain values.
        data: Arrays in base64.
        styles: Names of the style sheets.
        script: Name of the script.
        max_mb: Largest size of the page in MB.

    Raises:
        OptionError: If the page exceeds `max_mb`.
    """
    told = json.dumps(facts, allow_nan=False).replace("<", "\\u003c")
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(printable(title)[:200])}</title>\n'
        f"<style>{''.join(map(_built, styles))}</style>\n</head>\n<body>\n<noscript>This page needs JavaScript.</noscript>\n"
        f'<script type="application/json" id="facts">{told}</script>\n'
        f'<script type="application/octet-stream" id="data">{data}</script>\n'
        f"<script>{_built(script)}</script>\n</body>\n</html>\n"
    )
    check_size(len(page), max_mb)
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
