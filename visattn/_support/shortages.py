"""Shortages of memory, which libraries report by several types of errors."""

from __future__ import annotations

import torch

from visattn._support.checks import first_line

_NO_MEMORY = "can't allocate memory", "out of memory"


def lacks_memory(error: BaseException) -> bool:
    """Check whether an error says that there is not enough memory."""
    told = isinstance(error, RuntimeError) and any(text in first_line(error) for text in _NO_MEMORY)
    return told or isinstance(error, (MemoryError, torch.OutOfMemoryError))
