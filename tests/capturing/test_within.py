"""Tests of the judge of programs that move tokens within one pass: it finds moves right, and false claims wrong.

`python -m tests.capturing.within` judges all programs and prints a table.
"""

from __future__ import annotations

from collections import Counter

import pytest
from torch import Tensor

from tests.capturing.within import FAMILIES, generated, judge, verdicts
from tests.capturing.within.judge import Claim
from tests.capturing.within.model import Program
from visattn.records import TokenLayout

MOVES = {"as they are": lambda _, t: t, "turned": lambda _, t: t.flip(1), "rolled": lambda _, t: t.roll(5, 1)}


def outcome(name: str) -> str:
    (found,) = verdicts(iter([Program("calls", name, MOVES[name], residual=False)]))
    return found.outcome


@pytest.mark.parametrize("name", MOVES)
def test_moves_that_are_placed_are_right(name: str) -> None:
    assert outcome(name) == "right"


@pytest.mark.parametrize("name", MOVES)
def test_claims_of_other_cells_are_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = judge.claims_of

    def shifted(layout: TokenLayout, index: Tensor | None, count: int) -> list[Claim | None]:
        claims = right(layout, index, count)
        return claims[1:] + claims[:1]

    monkeypatch.setattr(judge, "claims_of", shifted)
    assert outcome(name) == "wrong"


def test_claims_that_image_tokens_are_learned_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "claims_of", lambda _layout, _index, count: [Claim(f"token{i}", None) for i in range(count)])
    assert outcome("as they are") == "wrong"


def test_there_are_enough_programs() -> None:
    by_hand = list(generated(by_hand=True))
    counts = Counter(program.family for program in by_hand)
    assert set(counts) <= set(FAMILIES)
    assert sum(counts.values()) >= 400
    assert counts["two inputs"] >= 40
    assert len({(program.family, program.name) for program in by_hand}) == len(by_hand)
