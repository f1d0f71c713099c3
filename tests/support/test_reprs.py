"""Names of many tokens in one line."""

from __future__ import annotations

import pytest

from visattn._support.reprs import in_runs


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ""),
        (["0"], "0"),
        ([""], ""),
        (["cls", "register0", "register1"], "cls+register0+register1"),
        (["cls", *(f"foreign{number}" for number in range(9, 30)), "word3"], "cls+foreign9 to foreign29+word3"),
        (["a1", "a3", "b4", "b5", "b6", "b7", "b8", "c9"], "a1+a3+b4 to b8+c9"),
    ],
)
def test_long_runs_are_told_by_their_ends(names: list[str], expected: str) -> None:
    assert in_runs(names, "+") == expected
