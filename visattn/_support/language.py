"""Language of messages: an option is named as its caller writes it, in Python or in the shell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_shell = False
FLAGS = {"output": "-o/--output", "donor": "--from"}  # options whose flag is not their name


@contextmanager
def in_shell() -> Iterator[None]:
    """Speak the language of the shell inside of the `with` block, in all threads."""
    global _shell
    before, _shell = _shell, True
    try:
        yield
    finally:
        _shell = before


def worded(python: str, shell: str) -> str:
    """Return one of two texts, by the caller's language."""
    return shell if _shell else python


def option(name: str, value: Any = None) -> str:  # noqa: ANN401
    """Return an option as the caller writes it, such as `img_size` or `--img-size`.

    Args:
        name: The keyword in Python.
        value: Value to show with it: `weights='none'` or `--weights none`. One in capital letters is a placeholder: `weights=FILE`.
            True is a flag without a value: `overwrite=True` or `--overwrite`.
    """
    flagged = FLAGS.get(name, f"--{name.replace('_', '-')}")
    if value is None:
        return worded(name, flagged)
    placeholder = isinstance(value, str) and value.isupper()
    return worded(f"{name}={value if placeholder else repr(value)}", flagged if value is True else f"{flagged} {value}")


def flag(name: str) -> str:
    """Return the flag of an option in parentheses, after a space, for the shell; nothing for Python, where the sentence suffices."""
    return worded("", f" ({option(name)})")
