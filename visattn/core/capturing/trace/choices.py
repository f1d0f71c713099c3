"""Tokens that a model picks by their content in a running forward pass; see `Entry.choice`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from visattn.core.capturing.trace.tape import Entry


class Choices:
    """Tokens that were picked by content, such as those with the best scores, by number of the choice."""

    def __init__(self) -> None:
        """Start without choices."""
        self._picked: dict[int, Tensor] = {}  # indices of the tokens, by number of the choice

    def fits(self, number: int, index: Tensor) -> bool:
        """Check whether `index` picks the tokens that other calls with this number of the choice have picked; if so, keep them.

        Calls with another number must have picked other tokens. All channels of a token are picked, so the first one is compared.
        """
        picked = index.detach()[..., 0].clone()
        equal_choices = [
            other_number
            for other_number, other_picked in self._picked.items()
            if other_picked.shape == picked.shape and torch.equal(other_picked, picked)
        ]
        expected_choices = [number] if number in self._picked else []
        fits = equal_choices == expected_choices
        if fits:
            self._picked[number] = picked
        return fits

    def renew(self, entries: Iterable[Entry]) -> None:
        """Replace the indices of picked tokens in entries of an earlier forward pass by those of this one.

        Entries that follow are compared with them.
        """
        for entry in entries:
            if entry.choice is not None:
                picked = self._picked[entry.choice]
                entry.contents = {slot: picked[..., None].expand_as(index) for slot, index in entry.contents.items()}
