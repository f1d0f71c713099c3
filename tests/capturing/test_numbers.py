"""Numbers that Python reads from image tokens: flags steer a program; other numbers, and lengths, may be values in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import visattn
from tests.capturing.moving import WIDTH
from tests.capturing.test_earned import REFUSED, outcome
from tests.capturing.within.common import LENGTHS, lit, picked
from tests.capturing.within.model import TOKENS, Change, Mover, Program, inputs_of, quietly


def bright(t: Tensor) -> Tensor:
    """Return a flag for each image, `(B, 1)`."""
    return t.mean((1, 2))[:, None] > 0


def counted(read: Callable[[Tensor], Any]) -> Change:
    """Read a number, and use others as values."""
    return lambda _, t: t.flip(1) + torch.full_like(t, 2.0) * (0.5 if read(t) is None else 1)


def overwritten(t: Tensor) -> list[Any]:
    count = bright(t).sum(1)
    count.view(-1).copy_((t[:, 5, 0] * 100).long())
    return count.tolist()


STEERING: dict[str, Change] = {
    "how many of one image": counted(lambda t: bright(t).sum(1).tolist()),
    "a sum of one flag": counted(lambda t: bright(t).sum().item()),
    "a length": lambda _, t: t + torch.arange(int(t[0, 5, 0] * 0) + WIDTH),
    "a length from zero": lambda _, t: t + torch.arange(0, int(t[0, 5, 0] * 0) + WIDTH),
}
VALUES: dict[str, Change] = {
    "how many tokens": counted(lambda t: (t[:, :, 0] > 0).sum(1).tolist()),
    "how many of two": counted(lambda t: (t[:, :2, 0] > 0).sum().item()),
    "a sum of one number": counted(lambda t: t[:, :1, 0].sum(1).tolist()),
    "a sum of one whole number": counted(lambda t: (t[:, :1, 0] * 100).long().sum(1).tolist()),
    "a sum of one flag, overwritten": counted(overwritten),
    "a sum of one flag, then of a number": counted(lambda t: (bright(t).sum(1) * (t[:, 5, 0] * 100).long()).tolist()),
    "a beginning": lambda _, t: t + torch.arange(n := int(t[0, 5, 0] * 100), n + WIDTH),
    "a step": lambda _, t: t + torch.arange(0, WIDTH * (n := abs(int(t[0, 5, 0] * 100)) + 1), n),
    "an end that is a value": lambda _, t: t + torch.linspace(0, float(t[0, 5, 0]), WIDTH),
    "a value": lambda _, t: 0.01 * t + torch.full((1, TOKENS, 1), float(t[0, 5, 0])),
}


def put_back(_: Any, t: Tensor) -> Tensor:
    out = t.clone()
    out[0, lit(t)] = picked(t) * 2
    return out


def picked_by_given_flags(_: Any, t: Tensor) -> Tensor:
    flags = torch.arange(TOKENS) % 2 == 0
    return 0.01 * len(t[0][flags]) * t.flip(1)


STEERING |= {"tokens put back": put_back, "a length from flags of the model": picked_by_given_flags}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_that_depend_on_the_image_may_be_values(name: str) -> None:
    assert outcome(LENGTHS[name]) in REFUSED


def test_a_length_that_is_read_along_a_known_tape_counts_when_the_model_leaves_it() -> None:
    adds: list[bool] = []

    def change(_: Any, t: Tensor) -> Tensor:
        turned = 0.01 * t.flip(1)
        count = len(picked(t))
        return turned + count if adds else turned

    model = Mover(Program("", "", change))
    reasons = []
    for _ in range(2):
        with visattn.capture(model) as recording:
            quietly(model, *inputs_of(model.program[0], 0))
        reasons.append(recording[0].reason)
        adds.append(True)
    assert reasons[0] is None
    assert "numbers that were read" in str(reasons[1])


@pytest.mark.parametrize("name", STEERING)
def test_flags_and_sizes_that_were_read_are_no_values(name: str) -> None:
    assert outcome(STEERING[name]) == "right"


@pytest.mark.parametrize("name", VALUES)
def test_other_numbers_that_were_read_may_be_values(name: str) -> None:
    assert outcome(VALUES[name]) in REFUSED
