"""Switch that turns `torch.compile` off during a capture, because compiled code bypasses function modes.

The setting applies to the whole process. Captures in several threads share it: the first turns compilation off, and the last
restores it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_open: list[torch._dynamo.set_stance] = []  # the active stance, once per open capture


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run models and functions of `torch.compile` without compilation inside the `with` block; what is compiled already is kept.

    Captures that are open at once share the setting: the first one makes it, and the last one restores it.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and importing it takes longer than a forward pass
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
