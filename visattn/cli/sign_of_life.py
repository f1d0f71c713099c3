"""A sign of life in a terminal: a command without output for two seconds counts them on a line that its next output replaces."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_IDLE = 2.0  # seconds without output before the line appears
_CLEAR = "\r\033[K"


@contextmanager
def sign_of_life() -> Iterator[None]:
    """Show the line inside a `with` block, if stderr is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    line = _Line(sys.stderr.write)
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and stream.isatty()]
    for stream in streams:
        stream.write = line.cleared_before(stream)  # type: ignore[method-assign]
    counting = threading.Thread(target=line.count, daemon=True)
    counting.start()
    try:
        yield
    finally:
        line.end()
        counting.join()
        for stream in streams:
            del stream.write


class _Line:
    def __init__(self, write: Callable[[str], int]) -> None:
        """Write the line with this function of stderr."""
        self._write, self._lock, self._ended = write, threading.Lock(), threading.Event()
        self._began = self._last = time.monotonic()
        self._shown = False

    def count(self) -> None:
        """Write the line anew each second."""
        while not self._ended.wait(1):
            with self._lock:
                if time.monotonic() - self._last >= _IDLE:
                    self._shown = True
                    self._put(f"{_CLEAR}visattn: working, {time.monotonic() - self._began:.0f} s")

    def end(self) -> None:
        """Remove the line, and write it no more."""
        self._ended.set()
        with self._lock:
            self._clear()

    def cleared_before(self, stream: TextIO) -> Callable[[str], int]:
        """Return the function that writes to a stream, which removes the line first."""
        write = stream.write

        def cleared(text: str) -> int:
            with self._lock:
                self._clear()
                self._last = time.monotonic()
                return write(text)

        return cleared

    def _clear(self) -> None:
        if self._shown:
            self._shown = False
            self._put(_CLEAR)

    def _put(self, text: str) -> None:
        self._write(text)
        sys.stderr.flush()
