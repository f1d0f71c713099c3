"""Conditions on values of a forward pass: all of them are read at once, by the first that is asked for its outcome."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from visattn.core.capturing.trace.verdicts import Verdicts


def test_conditions_are_read_together_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    original = Tensor.tolist

    def tolist(tensor: Tensor) -> list[bool]:
        reads.append(len(tensor))
        return original(tensor)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    verdicts = Verdicts()
    first, second = (verdicts.on(torch.tensor(value)) for value in (True, False))
    assert reads == []
    assert (second(), first(), second()) == (False, True, False)
    assert reads == [2]
    third = verdicts.on(torch.tensor(True))
    assert (third(), first()) == (True, True)
    assert reads == [2, 1]
