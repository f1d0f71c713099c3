"""Tensors that hold one value for all tokens, copied in memory: what tokens have in common gives none of them a second place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capturing.test_earned import REFUSED, outcome
from tests.capturing.within.model import TOKENS, Change


def one(index: int) -> Tensor:
    """Return weights `(N, 1)` that are zero but for one token."""
    return torch.eye(TOKENS)[index][:, None]


def repeated(t: Tensor) -> Tensor:
    return t.mean(1, keepdim=True).repeat(1, TOKENS, 1)


PLACED: dict[str, Change] = {
    "a mean, repeated": lambda _, t: t + repeated(t),
    "a mean, repeated, as a factor": lambda _, t: t + t * repeated(t),
    "a mean, expanded and copied": lambda _, t: t + t.mean(1, keepdim=True).expand_as(t).clone(),
    "a mean, expanded and cast": lambda _, t: t + t.mean(1, keepdim=True).expand_as(t).double().float(),
    "a mean, repeated and copied": lambda _, t: t + repeated(t).clone(),
    "a sum": lambda _, t: t + t.sum(1, keepdim=True).repeat(1, TOKENS, 1),
}


def largest(t: Tensor) -> Tensor:
    """Return the largest value of each channel, repeated."""
    return t.amax(1, keepdim=True).repeat(1, TOKENS, 1)


def added(t: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    """Add copies that were overwritten, so that they reach token 70 alone."""
    copies = largest(t)
    write(copies)
    return 0.01 * t + copies


ATTACKS: dict[str, Change] = {
    "a sum with weights": lambda _, t: t + (t * torch.rand(TOKENS, 1)).sum(1, keepdim=True).repeat(1, TOKENS, 1),
    "weights of their own": lambda _, t: 0.01 * t + largest(t) * one(70),
    "written in place": lambda _, t: added(t, lambda z: z.mul_(one(70))),
    "written through a view": lambda _, t: added(t, lambda z: z.view(TOKENS, -1).mul_(one(70))),
    "written through a slice": lambda _, t: added(t, lambda z: (z[:, :70].zero_(), z[:, 71:].zero_())),
    "written through numpy": lambda _, t: added(t, lambda z: z.numpy().__imul__(one(70).numpy())),
    "written, then copied": lambda _, t: added(t, lambda z: z.mul_(one(70))) + 0 * t.clone(),
    "copied after a write": lambda _, t: 0.01 * t + largest(t).mul_(one(70)).clone(),
    "one of two": lambda _, t: 0.01 * t + torch.stack([t[:, 5], t[:, 6]], 1).repeat(1, TOKENS // 2, 1),
    "one token": lambda _, t: t + t[:, 5:6].repeat(1, TOKENS, 1),
}


@pytest.mark.parametrize("name", PLACED)
def test_what_tokens_have_in_common_leaves_them_in_place(name: str) -> None:
    assert outcome(PLACED[name]) == "right"


@pytest.mark.parametrize("name", ATTACKS)
def test_copies_that_differ_are_refused(name: str) -> None:
    assert outcome(ATTACKS[name]) in REFUSED
