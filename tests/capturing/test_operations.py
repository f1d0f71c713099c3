"""Every operation that a function mode can intercept, between embedding and attention: none fails, none is located wrongly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capturing.moving import GRID, Moving, image, judged
from tests.capturing.operations import Arguments, functions, listed, made
from tests.conftest import Figures

pytestmark = pytest.mark.full


class Probed(Moving):
    def __init__(self, func: Callable[..., Any], arguments: Arguments) -> None:
        super().__init__(lambda _, t: made(func, arguments, t))  # type: ignore[arg-type,return-value]


def decided(model: Moving, x: Tensor) -> bool:
    """Check whether brightening one patch changes exactly one token, and a different one for each patch."""
    with torch.no_grad():
        before, met = model.between[0](model, model.tokens(x)), []
        for row, column in ((0, 0), (2, 7), (5, 3), (7, 11)):
            lit = x.clone()
            lit[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 3
            after = model.between[0](model, model.tokens(lit))
            met.append(((after - before).abs().amax((0, 2)) > 1e-5).nonzero().flatten().tolist())
    return (
        before.shape[1] == GRID[0] * GRID[1] and all(len(tokens) == 1 for tokens in met) and len({tuple(one) for one in met}) == 4
    )


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.evidence)])
def test_operations_between_embedding_and_attention(every: int, figures: Figures) -> None:
    calls, without = listed()
    x, wrong, decisive, placed, refused = image(), {}, 0, 0, []
    for name, (func, arguments) in list(calls.items())[::every]:
        model = Probed(func, arguments)
        try:
            with torch.no_grad():
                model(x)
        except Exception:
            continue  # it fails without a capture too
        verdicts = {judged(model, x, probes=3, covers=False)}
        if any(verdict.startswith("wrong") for verdict in verdicts):
            wrong[name] = verdicts
        if decided(model, x):
            decisive += 1
            placed += verdicts == {"right"}
            refused += [] if verdicts == {"right"} else [(name, *verdicts)]
    for reason, count in Counter(without.values()).items():
        figures(f"operations without a call: {reason}", count, "-")
    figures("operations: called", len(calls), "900 or more")
    figures("operations: one patch decides", decisive, "-")
    figures("operations: of these placed", placed / decisive, "0.9 or more")
    assert not wrong
    assert len(calls) >= 900
    assert placed / decisive >= 0.9, refused


def test_every_operation_has_a_test_call_or_a_reason_to_skip() -> None:
    calls, without = listed()
    assert {name for name, _, _ in functions()} == calls.keys() | without.keys()
    assert not calls.keys() & without.keys()
    assert all(without.values())


if __name__ == "__main__":  # python -m tests.capturing.test_operations
    for name, reason in sorted(listed().without.items(), key=lambda item: item[::-1]):
        print(f"{reason}: {name}")  # noqa: T201
