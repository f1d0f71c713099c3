"""Warnings and notes of the Python interface, at the user's own line."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

from visattn.errors import VisattnNote, VisattnWarning

_PACKAGE = f"{Path(__file__).parent.parent}/"


def warn(text: str) -> None:
    """Warn that a result may mislead, or that something was left out."""
    warnings.warn(text, VisattnWarning, stacklevel=_depth())


def note(text: str) -> None:
    """Tell what was understood or done."""
    warnings.warn(text, VisattnNote, stacklevel=_depth())


def _depth() -> int:
    """Return the number of frames from the caller up to the innermost one outside of visattn and of `with` blocks in it."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__)):
        depth, frame = depth + 1, frame.f_back
    return depth
