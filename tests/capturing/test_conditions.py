"""Constants that image tokens choose lie where the tokens do that chose them."""

from __future__ import annotations

import pytest
import torch

from tests.capturing.test_earned import REFUSED, outcome
from tests.capturing.within.model import TOKENS, Change

PLACED: dict[str, Change] = {
    "one of two numbers": lambda _, t: torch.where(t > 0, 1.0, -1.0),
    "a learned vector or zero": lambda m, t: torch.where(t > 0, m.pos, 0.0),
    "zeros, filled": lambda _, t: torch.zeros_like(t).masked_fill_(t > 0, 1.0),
    "of another order": lambda _, t: torch.where(t.flip(1) > 0, 1.0, -1.0),
    "beside their tokens": lambda _, t: t + torch.where(t > 0, 1.0, -1.0),
}
REFUSED_CHANGES: dict[str, Change] = {
    "one token for all": lambda _, t: torch.where(t[:, :1] > 0, 1.0, -1.0).expand_as(t),
    "one token for all, beside tokens": lambda m, t: 0.01 * t + torch.where(t[:, 5:6] > 0, m.pos, 0.0),
    "of another order, beside tokens": lambda _, t: 0.01 * t + torch.where(t.flip(1) > 0, 1.0, -1.0),
    "zeros, filled in another order, beside tokens": lambda _, t: 0.01 * t + torch.zeros_like(t).masked_fill_(t.flip(1) > 0, 1.0),
    "a mask of keys as weights": lambda _, t: torch.zeros(1, TOKENS, TOKENS).masked_fill_(t[:, :, :1].mT > 0, 1.0) @ t,
}


@pytest.mark.parametrize("name", PLACED)
def test_constants_lie_where_their_condition_does(name: str) -> None:
    assert outcome(PLACED[name]) == "right"


@pytest.mark.parametrize("name", REFUSED_CHANGES)
def test_conditions_from_elsewhere_are_refused(name: str) -> None:
    assert outcome(REFUSED_CHANGES[name]) in REFUSED
