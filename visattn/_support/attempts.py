"""Attempts to run a model, which may raise anything."""

from __future__ import annotations

from types import TracebackType

from visattn._support.shortages import lacks_memory


class Attempt:
    """Block that may fail; only Ctrl-C is passed on.

    Attributes:
        failed: Whether the block raised an error.
        lasts: Whether the next attempt would fail as well; not if there was too little memory, or a file could not be read.
    """

    failed, lasts = False, False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> bool:
        if isinstance(error, KeyboardInterrupt):
            return False
        self.failed = error is not None
        self.lasts = error is not None and not isinstance(error, OSError) and not lacks_memory(error)
        return True
