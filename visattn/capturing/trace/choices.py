"""Tokens that a model picks by their content in a running forward pass; see `Entry.choice`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from visattn.capturing.trace.tape import Entry


class Choices:
    """Picked tokens, by number of the choice."""

    def __init__(self) -> None:
        """Start without choices."""
        self._picked: dict[int, Tensor] = {}

    def fits(self, number: int, index: Tensor) -> bool:
        """Check that the tokens picked here are those of the other entries with this number, and of no others; if so, keep them."""
        picked = index.detach()[..., 0].clone()
        equal = [known for known, one in self._picked.items() if one.shape == picked.shape and torch.equal(one, picked)]
        same = equal == ([number] if number in self._picked else [])
        if same:
            self._picked[number] = picked
        return same

    def renew(self, entries: Iterable[Entry]) -> None:
        """Give entries of an earlier forward pass the indices of this one, with which those that follow are compared."""
        for entry in entries:
            if entry.choice is not None:
                picked = self._picked[entry.choice]
                entry.contents = {slot: picked[..., None].expand_as(index) for slot, index in entry.contents.items()}
