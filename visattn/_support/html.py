"""Small pieces of HTML, for notebooks."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape


def figure(jpeg: bytes, lines: Sequence[str]) -> str:
    """Return a JPEG picture with lines of text below it; warnings are bold."""
    source = b64encode(jpeg).decode()
    return f'<figure><img src="data:image/jpeg;base64,{source}"><figcaption>{joined(lines)}</figcaption></figure>'


def joined(lines: Sequence[str]) -> str:
    """Return lines of text below each other; warnings are bold."""
    return "<br>".join(f"<b>{escape(line)}</b>" if line.startswith("warning") else escape(line) for line in lines)
