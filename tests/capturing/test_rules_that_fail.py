"""An exception inside a placing rule loses the results and the memory that was written; the forward pass goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from tests.capturing.moving import Moving, image, see
from visattn.core.capturing.placing import follow, operation_table as table
from visattn.core.capturing.placing.operation_table import Row


def _halves(t: Tensor) -> Tensor:
    made = torch.empty_like(t)
    made[:, :48], made[:, 48:] = t[:, :48], t[:, 48:]
    return made


def _part(_: nn.Module, t: Tensor) -> Tensor:
    made = _halves(t)
    made[:, 10:50].relu_()
    return made


def _whole(_: nn.Module, t: Tensor) -> Tensor:
    made = _halves(t)
    left, right = made[:, :48], made[:, 48:]
    made.zero_()
    return torch.cat([left, right], 1)


def _random(_: nn.Module, t: Tensor) -> Tensor:
    made = t * 1.0
    left, right = made[:, :48], made[:, 48:]
    made.normal_(generator=torch.Generator().manual_seed(0))
    return torch.cat([left, right], 1)


def _list(_: nn.Module, t: Tensor) -> Tensor:
    one, other = t * 1.0, t * 2.0
    torch._foreach_tanh_([one, other])
    return one


BROKEN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "relu": _part,
    "zero": _whole,
    "normal": _random,
    "tanh": _list,
    "flip": lambda _, t: t.flip(1),
}
ERRORS = [KeyError("key"), RuntimeError("text"), MemoryError(), RecursionError(), AssertionError(), torch.OutOfMemoryError()]


def _break(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    def row_of(op: OpOverload) -> tuple[str, Row | None]:
        found, row = table.row_of(op)
        return found, row._replace(rule=rule) if row is not None and found == name else row

    def rule(_: Any) -> Any:
        raise error

    monkeypatch.setattr(follow, "row_of", row_of)


@pytest.mark.parametrize("error", ERRORS, ids=[type(error).__name__ for error in ERRORS])
@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_that_raises_loses_its_results_and_the_memory_that_was_written(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Moving(BROKEN[name])
    with torch.no_grad():
        expected = model(image())
    _break(monkeypatch, name, error)
    recording = see(model, image())
    assert recording[0].reason == (
        "its tokens could not be traced from the pixels beyond " + ("a write" if name == "relu" else name)
    )
    monkeypatch.undo()
    with torch.no_grad():
        assert torch.equal(model(image()), expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_inside_a_rule_passes_through(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, "flip", error())
    with pytest.raises(error):
        see(Moving(BROKEN["flip"]), image())
