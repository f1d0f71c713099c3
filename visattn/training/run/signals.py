"""Handling of signals that ask a training to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Handle SIGTERM and SIGINT: the first asks to stop after the current step, the second stops at once.

    Yields:
        List of the signals received so far. It stays empty outside the main thread, where signals cannot be handled.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, _frame: object) -> None:
        if asked:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)
        asked.append(number)

    before: dict[int, Any] = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
