"""torch.compile is off while anything is captured: compiled code hands nothing to a function mode.

That is one setting for the whole process, so captures in several threads share it: the first turns it off, the last puts it back.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_open: list[torch._dynamo.set_stance] = []  # the one that is on, as often as there are captures


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled models and functions as they were written; what was compiled before stays compiled."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and importing it takes longer than a forward
        yield
        return
    with _lock:
        _open.append(_open[0] if _open else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            stance = _open.pop()
            if not _open:
                stance.__exit__(None, None, None)
