"""Conditions on values that a forward pass has left on its device, such as that weights are as they were; all are read together.

Weights are compared by marks, since PyTorch does not count writes through `.data`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

Verdict = Callable[[], bool]
LARGE = 1 << 15  # numbers of a weight above which its projection is several times faster than a comparison


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
        return partial(self._outcome, number)

    def _outcome(self, number: int) -> bool:
        unread = self._conditions[len(self._outcomes) :]
        if unread:
            self._outcomes += torch.stack([condition.to(unread[0].device) for condition in unread]).tolist()
        return self._outcomes[number]


def mark_of(weight: Tensor) -> Tensor:
    """Return a copy of a small weight, and a projection of each row of a large one to a random direction.

    A write that changes no row's projection is as likely as none at all.
    """
    weight = weight.detach()
    if weight.numel() <= LARGE or weight.ndim < 2 or not weight.is_floating_point():
        return weight.clone()
    is_channels_last = weight.ndim == 4 and not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)
    rows = (weight.permute(0, 2, 3, 1) if is_channels_last else weight).flatten(1)
    return torch.mv(rows, _direction(rows.shape[1], rows.dtype, rows.device))


@lru_cache(64)
def _direction(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(device, dtype)
