"""Properties of functions that their names tell: which write, change shapes, hand out memory or numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.core.capturing.trace import operations
from visattn.core.capturing.trace.operations import ASK, EDITED, LENGTHS, Operation, edited_weights, operation_of, overwrites

WRITING: list[Callable[..., Any]] = [
    Tensor.add_,
    Tensor.__iadd__,
    Tensor.__setitem__,
    Tensor.data.__set__,  # type: ignore[attr-defined]
    torch.ops.aten.add_.Tensor,
    F.relu_,
]
PURE: list[Callable[..., Any]] = [
    Tensor.add,
    Tensor.__add__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.__invert__,
    Tensor.__iter__,
    Tensor.T.__get__,  # type: ignore[attr-defined]
    torch.ops.aten.add.Tensor,
    torch.relu,
    Tensor.unsqueeze_,
    Tensor.t_,
    edited_weights,
]


@pytest.mark.parametrize("func", WRITING)
def test_function_that_writes_into_its_operand_is_known(func: Callable[..., Any]) -> None:
    assert operation_of(func).writes
    assert not operation_of(func).reforms
    assert overwrites(func, (torch.zeros(2),), {})


@pytest.mark.parametrize("func", PURE)
def test_function_that_writes_nothing_is_known(func: Callable[..., Any]) -> None:
    assert not operation_of(func).writes
    assert not overwrites(func, (torch.zeros(2),), {})


def test_shape_that_is_changed_in_place_is_no_write() -> None:
    assert operation_of(Tensor.unsqueeze_) == Operation("unsqueeze", True, False, True, False, False, -1)
    assert not operation_of(Tensor.unsqueeze).reforms


@pytest.mark.parametrize(
    ("func", "exposes", "tells"),
    [
        (Tensor.numpy, True, True),
        (Tensor.__array__, True, True),
        (Tensor.data_ptr, True, True),
        (Tensor.item, False, True),
        (Tensor.__float__, False, True),
        (Tensor.tolist, False, True),
        (Tensor.add, False, False),
        (Tensor.__len__, False, False),
    ],
)
def test_function_that_hands_out_memory_or_numbers_is_known(func: Callable[..., Any], exposes: bool, tells: bool) -> None:
    assert (operation_of(func).exposes, operation_of(func).tells) == (exposes, tells)


@pytest.mark.parametrize(
    ("func", "name", "own"),
    [
        (Tensor.add_, "add", True),
        (Tensor.__add__, "__add__", True),
        (torch.linalg.vecdot, "vecdot", True),
        (torch.special.softmax, "softmax", True),
        (torch.view_copy, "view", True),
        (Tensor.index_copy, "index_copy", True),
        (torch.ops.aten.copy.default, "copy", True),
        (torch.ops.aten._to_copy.default, "to", True),
        (torch.ops.prims.sum.default, "sum", True),
        (Tensor.mT.__get__, "mT", True),  # type: ignore[attr-defined]
        (Tensor.data.__set__, "set data", True),  # type: ignore[attr-defined]
        (edited_weights, EDITED, True),
        (F.softmax, "softmax", True),
        (torch.einsum, "einsum", True),
        (torch._C._nn.gelu, "gelu", True),
        (np.sum, "sum", False),
    ],
)
def test_function_is_known_by_its_name(func: Callable[..., Any], name: str, own: bool) -> None:
    assert (operation_of(func).name, operation_of(func).own) == (name, own)


def test_function_of_other_code_is_not_pytorchs() -> None:
    def softmax_copy(x: Tensor, inplace: bool = False) -> Tensor:
        return x

    assert operation_of(softmax_copy) == Operation("softmax_copy", False, False, False, False, False, -1)
    library = torch.library.Library("visattn_properties", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("softmax(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    assert operation_of(torch.ops.visattn_properties.softmax.default).own is False


@pytest.mark.parametrize(
    ("func", "position"), [(F.relu, 1), (F.dropout, 3), (F.hardtanh, 3), (F.elu, 2), (torch.relu, -1), (F.gelu, -1)]
)
def test_position_of_the_argument_inplace_is_known(func: Callable[..., Any], position: int) -> None:
    assert operation_of(func).inplace == position


def test_call_that_writes_in_place_says_so() -> None:
    x = torch.zeros(2)
    assert overwrites(F.relu, (x, True), {})
    assert overwrites(F.relu, (x,), {"inplace": True})
    assert not overwrites(F.relu, (x, False), {})
    assert not overwrites(F.relu, (x,), {})
    assert not overwrites(F.relu, (x,), {"inplace": False})
    assert not overwrites(F.dropout, (x, 0.5, True), {})
    assert overwrites(F.dropout, (x, 0.5, True, True), {})
    assert overwrites(torch.add, (x, x), {"out": x})
    assert not overwrites(torch.add, (True, x), {})
    assert not overwrites(torch.add, (x, True), {})

    def first(inplace: bool) -> bool:
        return inplace

    assert not overwrites(first, (True,), {})


def test_argument_inplace_may_be_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operations._operations, torch.cos, operation_of(torch.cos)._replace(inplace=0))
    assert overwrites(torch.cos, (True,), {})
    assert not overwrites(torch.cos, (False,), {})
    assert not overwrites(torch.cos, (), {})


@pytest.mark.parametrize(
    ("func", "asks", "lengths"),
    [
        (Tensor.dtype.__get__, True, False),  # type: ignore[attr-defined]
        (Tensor.dim, True, False),
        (Tensor.shape.__get__, True, True),  # type: ignore[attr-defined]
        (Tensor.__len__, True, True),
        (torch.numel, True, True),
        (Tensor.T.__get__, False, False),  # type: ignore[attr-defined]
        (Tensor.item, False, False),
    ],
)
def test_function_that_only_asks_for_metadata_is_known(func: Callable[..., Any], asks: bool, lengths: bool) -> None:
    assert (func in ASK, func in LENGTHS) == (asks, lengths)


def test_properties_of_a_function_are_kept() -> None:
    assert operation_of(torch.cos) is operation_of(torch.cos)


def test_edited_weights_are_returned_as_they_are() -> None:
    weights = torch.zeros(2)
    assert edited_weights(weights, torch.ones(2)) is weights
    called: list[Any] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append((func, args))
            return func(*args)

    operand = torch.ones(3)
    with Mode():
        assert edited_weights(weights, operand) is weights
    ((func, args),) = called
    assert func is edited_weights
    assert args[0] is weights
    assert args[1] is operand
