"""Commands and Python of the pages, in their order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCED = re.compile(r"^```(\w*) ?([\w.]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`(visattn [a-z][^`]*)`( \(long\))?")
_NAME = re.compile(r"visattn (\w+|train \w+)")  # a command's name alone
_PLACEHOLDER = re.compile(r"\b[A-Z]{4,}\b")  # NAME, MODEL


class Block(NamedTuple):
    """A fenced block, or a command inside of a text.

    Attributes:
        kind: `python`, or `sh`.
        mark: Empty; `long`: run with a limit; `make`, `install`, `cluster`: run elsewhere; a name as `own.py`: the file that the block is.
        text: The block as printed.
        inline: Whether the command stands inside of a text.
    """

    kind: str
    mark: str
    text: str
    inline: bool = False


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, then its commands inside of texts, each once."""
    text = page.read_text()
    fenced = [Block(*found) for found in _FENCED.findall(text)]
    outside = _FENCED.sub("", text)
    inline = [
        Block("sh", "long" if long else "", command, inline=True) for command, long in dict.fromkeys(_INLINE.findall(outside))
    ]
    return fenced + [one for one in inline if not _PLACEHOLDER.search(one.text) and not _NAME.fullmatch(one.text)]


def commands_of(block: Block) -> Iterator[list[str]]:
    """Yield the commands of a shell block as words; comments are left out, and continued lines are joined."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        if words:
            yield words
