"""Conditions on values that a forward pass has left on its device; all of them are read together, once it has ended."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Verdict = Callable[[], bool]


class Verdicts:
    """Conditions of one forward pass. The first that is asked for its outcome reads them all, so that a GPU is waited for once."""

    def __init__(self) -> None:
        """Start without conditions."""
        self._conditions: list[Tensor] = []
        self._outcomes: list[bool] = []

    def on(self, condition: Tensor) -> Verdict:
        """Add a condition, a tensor with one value, and return the function that reads its outcome."""
        number = len(self._conditions)
        self._conditions += (condition,)
        return lambda: self._read()[number]

    def _read(self) -> list[bool]:
        unread = self._conditions[len(self._outcomes) :]
        if unread:
            self._outcomes += torch.stack([condition.to(unread[0].device) for condition in unread]).tolist()
        return self._outcomes
