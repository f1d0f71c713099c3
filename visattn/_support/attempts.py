"""Attempts to run a model, which may raise anything."""

from __future__ import annotations

from types import TracebackType

import torch

_OF_THE_MACHINE = MemoryError, OSError, torch.OutOfMemoryError


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
        self.failed, self.lasts = error is not None, error is not None and not isinstance(error, _OF_THE_MACHINE)
        return True
