"""Progress of work that takes many forward passes: a bar in terminals and notebooks, after two seconds."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

_DELAY = 2.0  # seconds before a bar appears, so that short work shows none
_silent: ContextVar[bool] = ContextVar("_silent", default=False)


def silence(quiet: bool = True) -> None:
    """Show no bars from here on, as `--quiet` asks; or show them again."""
    _silent.set(quiet)


def progress(what: str, unit: str) -> Any:  # noqa: ANN401 - tqdm's types are partial
    """Return a bar of unknown length for a `with` block; `update(n)` counts. It disappears at the end."""
    from tqdm import tqdm  # not needed for `visattn --help`

    hidden = _silent.get() or not (sys.stderr.isatty() or _in_notebook())
    return tqdm(desc=what, unit=unit, delay=_DELAY, leave=False, disable=hidden)


def _in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")
