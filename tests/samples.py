"""Long lists of cases of one fact: `make test` and `make test-full` run a sample of them, `make evidence` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Return cases as parameters of a test, of which each `every`-th is in the sample; the others are marked `evidence`."""
    return [case if number % every == 0 else _for_evidence(case) for number, case in enumerate(cases)]


def _for_evidence(case: Any) -> Any:
    if not isinstance(case, type(pytest.param())):
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.evidence)
    return case._replace(marks=(*case.marks, pytest.mark.evidence))
