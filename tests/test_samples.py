"""Tests of the samples that the suites have of long lists of cases."""

from __future__ import annotations

import pytest

from tests.samples import sampled


def marks(case: object) -> set[str]:
    return {mark.name for mark in getattr(case, "marks", ())}


def test_the_first_and_each_third_case_are_in_the_sample() -> None:
    cases = sampled("abcdefg", 3)
    assert [marks(case) for case in cases] == [set(), {"evidence"}, {"evidence"}] * 2 + [set()]
    assert [case if isinstance(case, str) else case.values[0] for case in cases] == list("abcdefg")


def test_values_marks_and_names_of_a_case_stay() -> None:
    _, slow, pair = sampled(["a", pytest.param("b", id="slow", marks=pytest.mark.full), ("c", 3)], 3)
    assert (slow.values, slow.id, marks(slow)) == (("b",), "slow", {"full", "evidence"})
    assert (pair.values, marks(pair)) == (("c", 3), {"evidence"})
