"""Calls whose arguments are given by name, in any order, are recorded as those by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from visattn.core.records import Recording

Call = Callable[[Callable[..., Tensor], Mapping[str, Any]], Tensor]
ATEN_FUSED = torch.ops.aten.scaled_dot_product_attention.default


class Attention(nn.Module):
    """Cross-attention of the tokens in reverse order, whose calls are made by a given function, and self-attention behind it."""

    def __init__(self, kind: str, call: Call) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.patches, self.query = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 16)
        self.kind, self.call = kind, call

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT[:, None]  # as many as features, so that no shape tells operands apart
        linear = {"input": tokens.flip(2), "weight": self.query.weight, "bias": self.query.bias}
        query = self.call(F.linear, linear)
        mixed = getattr(self, f"_{self.kind}")(query, tokens)
        return F.scaled_dot_product_attention(mixed, mixed, mixed)

    def _fused(self, query: Tensor, tokens: Tensor) -> Tensor:
        return self.call(F.scaled_dot_product_attention, {"query": query, "key": tokens, "value": tokens})

    def _aten(self, query: Tensor, tokens: Tensor) -> Tensor:
        return self.call(ATEN_FUSED, {"query": query, "key": tokens, "value": tokens})

    def _matmul(self, query: Tensor, tokens: Tensor) -> Tensor:
        weights = self.call(torch.matmul, {"input": query, "other": tokens.mT}).softmax(-1)
        return self.call(torch.matmul, {"input": weights, "other": tokens})

    def _bmm(self, query: Tensor, tokens: Tensor) -> Tensor:
        weights = self.call(torch.bmm, {"input": query[0], "mat2": tokens[0].mT}).softmax(-1)
        return self.call(torch.bmm, {"input": weights, "mat2": tokens[0]})[None]


def by_position(func: Callable[..., Tensor], arguments: Mapping[str, Any]) -> Tensor:
    return func(*arguments.values())


def by_name(order: tuple[int, ...]) -> Call:
    """Return a function that makes calls by name, in an order of three names, of which a call may have two."""

    def call(func: Callable[..., Tensor], arguments: Mapping[str, Any]) -> Tensor:
        names = list(arguments)
        return func(**{names[place]: arguments[names[place]] for place in order if place < len(names)})

    return call


def first_by_position(func: Callable[..., Tensor], arguments: Mapping[str, Any]) -> Tensor:
    (_, first), *others = arguments.items()
    return func(first, **dict(reversed(others)))


def value_last(func: Callable[..., Tensor], arguments: Mapping[str, Any]) -> Tensor:
    """Make a fused call whose value has its name, behind a number."""
    if func is not F.scaled_dot_product_attention:
        return by_position(func, arguments)
    *others, value = arguments.values()
    return func(*others, dropout_p=0.0, value=value)


def recorded(model: nn.Module, x: Tensor) -> Recording:
    with torch.no_grad(), visattn.capture(model, values=True) as recording:
        model(x)
    return recording


def check_same(found: Recording, expected: Recording) -> None:
    assert len(found) == len(expected) == 2
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.reason is None
        assert (one.kind, one.queries, one.keys) == (other.kind, other.queries, other.keys)
        assert torch.equal(one.operator.dense(), other.operator.dense())
        for vectors in ("queries", "keys", "values"):
            assert torch.equal(getattr(found, vectors)(call=number), getattr(expected, vectors)(call=number))


@pytest.mark.parametrize("kind", ["fused", "aten", "matmul", "bmm"])
@pytest.mark.parametrize(
    "call",
    [*map(by_name, permutations(range(3))), first_by_position, value_last],
    ids=[*map(str, permutations(range(3))), "first by position", "value last"],
)
def test_arguments_by_name_in_any_order_are_those_by_position(kind: str, call: Call) -> None:
    x = torch.randn(1, 3, 16, 16)
    expected = recorded(Attention(kind, by_position).eval(), x)
    model = Attention(kind, call).eval()
    for _ in range(2):  # the second forward pass is a known one
        check_same(recorded(model, x), expected)


def test_another_order_in_a_later_forward_pass_changes_nothing() -> None:
    x, model = torch.randn(1, 3, 16, 16), Attention("fused", by_name((0, 1, 2))).eval()
    expected = recorded(model, x)
    model.call = by_name((2, 1, 0))
    check_same(recorded(model, x), expected)
