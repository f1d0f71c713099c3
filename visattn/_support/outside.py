"""Names from outside: of members of archives, remote files and entries of journals. Files that we write are named by them."""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePosixPath

LONGEST_PART = 240  # bytes; file systems allow 255, and an ending follows
LONGEST = 1024  # bytes of a whole name
DEEPEST = 32  # folders
_RESERVED = {"CON", "PRN", "AUX", "NUL", *(f"{port}{digit}" for port in ("COM", "LPT") for digit in range(1, 10))}  # of Windows
_TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # marks that show a name in another order


def fault_of(name: str) -> str | None:
    """Return what keeps a name from outside from naming a file that is written, or None: one rule for all sources of names.

    Args:
        name: A relative path with `/` between its parts.
    """
    parts = _parts(name)
    if name.startswith("/") or re.match(r"[A-Za-z]:[\\/]", name):
        return "is absolute"
    if ".." in parts:
        return "leads out of its folder"
    if "\\" in name or any(unicodedata.category(letter) == "Cc" or letter in _TURNING for letter in name):
        return "has control characters or backslashes"
    if not parts:
        return "is empty"
    if len(parts) > DEEPEST:
        return f"has {len(parts)} folders, more than {DEEPEST}"
    if len(_bytes(name)) > LONGEST or any(len(_bytes(part)) > LONGEST_PART for part in parts):
        return f"is longer than {LONGEST_PART} bytes in a part, or {LONGEST} in all"
    if any(part.partition(".")[0].rstrip().upper() in _RESERVED for part in parts):
        return "is reserved on some systems"
    return None


def relative(name: str) -> PurePosixPath:
    """Return a name without a fault as a path, without empty parts."""
    return PurePosixPath(*_parts(name))


def folded(name: str) -> str:
    """Return a key that is equal for names which some file system takes for one: they differ by case or Unicode form alone."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
