"""The page: markup, style, script and payload in one HTML file."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from visattn._support.checks import printable
from visattn._support.language import option
from visattn.errors import OptionError

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
MAX_MB = 60.0


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


def check_size(characters: int, most: float, where: str = "") -> None:
    """Check the size of a page, or of its part up to `where`.

    Raises:
        OptionError: If it exceeds `most` MB.
    """
    if characters > most * 1e6:
        found = f"more than {characters / 1e6:.1f} MB up to {where}" if where else f"{characters / 1e6:.1f} MB"
        raise OptionError(
            f"the page takes {found}, and {option('max_mb')} is {most:g}. Pass fewer {option('layers')} or {option('heads')}, a smaller "
            f"{option('img_size')}, or a larger {option('max_mb')}."
        )
