"""Tests of the judge of programs that move tokens within one pass: it finds moves right, and false claims wrong.

`python -m tests.capturing.within` judges all programs and prints a table.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capturing.moving import GRID, WIDTH
from tests.capturing.within import FAMILIES, generated, judge, verdicts
from tests.capturing.within.judge import Claim
from tests.capturing.within.model import TOKENS, Program, planes, raster
from visattn.core.records import TokenLayout

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


def dilated(_: object, t: Tensor) -> Tensor:
    return raster(F.conv2d(planes(t), torch.ones(WIDTH, 1, 3, 3), padding=2, dilation=2, groups=WIDTH))


def read_by_kernels(gap: int) -> Tensor:
    """Return which patches a kernel of three by three taps reads at each cell."""
    y, x = torch.arange(TOKENS) // GRID[1], torch.arange(TOKENS) % GRID[1]
    down, right = y - y[:, None], x - x[:, None]
    return ((down.abs() <= gap) & (right.abs() <= gap) & (down % gap == 0) & (right % gap == 0)).double()


def test_a_kernel_with_gaps_is_cut_off_although_it_reads_no_patch_at_the_border() -> None:
    cell = 1 * GRID[1] + 1  # the kernel's rows are -1, 1 and 3, and -1 is none of the image: 4 taps of 9 are left
    assert int(read_by_kernels(2)[cell].sum()) == 4
    inner = judge._inner(read_by_kernels(2), torch.arange(TOKENS)).view(GRID)
    assert not inner[1, 1]
    assert inner[3:5, 3:9].all()
    assert inner.sum() == 2 * 6


def test_a_kernel_without_gaps_is_cut_off_where_it_reads_a_patch_at_the_border() -> None:
    inner = judge._inner(read_by_kernels(1), torch.arange(TOKENS)).view(GRID)
    assert inner[2:6, 2:10].all()
    assert inner.sum() == 4 * 8


def test_dilated_kernels_are_right_at_their_center_and_wrong_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program("pooling", "dilated", dilated, resamples=True, residual=False)
    assert next(verdicts(iter([program]))).outcome == "right"
    right = judge.claims_of
    monkeypatch.setattr(judge, "claims_of", lambda *given: right(*given)[1:] + right(*given)[:1])
    assert next(verdicts(iter([program]))).outcome == "wrong"


def test_there_are_enough_programs() -> None:
    by_hand = list(generated(by_hand=True))
    counts = Counter(program.family for program in by_hand)
    assert set(counts) <= set(FAMILIES)
    assert sum(counts.values()) >= 400
    assert counts["two inputs"] >= 40
    assert len({(program.family, program.name) for program in by_hand}) == len(by_hand)
