"""Language of messages: an option is named as the caller writes it, in Python or in the shell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_shell = False
_FLAGS = {"output": "-o/--output", "path": "-o/--output"}  # options whose flag is not their name


@contextmanager
def in_shell() -> Iterator[None]:
    """Name options as flags of commands inside of the `with` block, in all threads."""
    global _shell
    before, _shell = _shell, True
    try:
        yield
    finally:
        _shell = before


def option_named(name: str, value: str = "") -> str:
    """Return an option as the caller writes it: `--max-bytes` or `max_bytes=`; with a value, `--overwrite` or `overwrite=True`."""
    if _shell:
        return _FLAGS.get(name, f"--{name.replace('_', '-')}") + (f" {value}" if value not in ("", "True") else "")
    return f"{name}={value}"


def worded(python: str, shell: str) -> str:
    """Return one of two texts, by the caller's language."""
    return shell if _shell else python
