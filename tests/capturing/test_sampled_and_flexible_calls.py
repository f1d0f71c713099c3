"""Calls that weight samples of maps, and calls of `flex_attention` that become fused calls with a bias."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from visattn.core.capturing.intercept.calls import Call, FusedCall, ProductCall, SampledCall
from visattn.core.capturing.intercept.flex import _shrunk, flex_call
from visattn.core.capturing.intercept.written_out import Product
from visattn.core.capturing.tokens.arrangement import SampledArrangement, Samples
from visattn.core.capturing.trace.product_axes import Permuted
from visattn.core.geometry import Box
from visattn.core.records import TokenLayout
from visattn.errors import UnsupportedModel

ROWS, COLUMNS = 3, 5
QUERIES, POINTS = 2, 2  # of each of two maps


def sampled() -> tuple[SampledCall, SampledArrangement, Tensor, tuple[Tensor, Tensor]]:
    """Return a call of one image and two queries, with two points on each of two maps, the points of which count half cells."""
    weights = torch.tensor([[[0.1, 0.2, 0.3, 0.4]], [[0.5, 0.25, 0.125, 0.125]]])  # (queries, 1, samples)
    on_first = torch.tensor([[[[1.25, 0.5], [4.5, 2.0]], [[-0.5, 1.0], [2.0, 1.0]]]])
    on_second = torch.tensor([[[[1.0, 1.0], [0.0, 0.0]], [[4.0, 2.0], [9.0, 9.0]]]])
    layout = TokenLayout("tokens", (), (ROWS, COLUMNS), Box(0, 0, ROWS, COLUMNS))
    samples = Samples(
        order=torch.tensor([1, 0]),
        number=torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]]),
        maps=(((1.0, 1.0), (0.0, 0.0)), ((0.5, 2.0), (0.25, -1.0))),
        size=(ROWS, COLUMNS),
        lead=(1, QUERIES),
    )
    arrangement = SampledArrangement("sampled", layout, layout, torch.zeros(1, 1, 1, dtype=torch.long), samples=samples)
    values = torch.zeros(QUERIES, 4, 6)
    points = {3: on_first, 8: on_second}
    call = SampledCall(Product(weights, values, Permuted(None, None, (0, 1, 2)), 0, True, points))
    return call, arrangement, weights, (on_first, on_second)


def spread(weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the weights of all cells, spread around each point in a loop."""
    cells = torch.zeros(QUERIES, ROWS * COLUMNS, dtype=torch.float64)
    for query in range(QUERIES):
        places = [tuple(point) for point in first[0, query].tolist()]
        places += [(x * 0.5 + 0.25, y * 2.0 - 1.0) for x, y in second[0, query].tolist()]
        for (x, y), weight in zip(places, weights[1 - query, 0].tolist(), strict=True):
            for row in range(ROWS):
                for column in range(COLUMNS):
                    cells[query, row * COLUMNS + column] += weight * max(0, 1 - abs(x - column)) * max(0, 1 - abs(y - row))
    return cells


def test_weights_are_spread_over_the_cells_around_each_point() -> None:
    call, arrangement, weights, points = sampled()
    operator = call.operator(arrangement)
    assert torch.allclose(operator.block(0)[0].double(), spread(weights, *points), atol=1e-6)


def test_each_sampled_map_needs_its_scale() -> None:
    call, arrangement, _, _ = sampled()
    call._points = call._points[:1]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        call.operator(arrangement)


def test_share_of_a_point_without_a_place_is_not_a_number() -> None:
    call, arrangement, _, (first, _) = sampled()
    first[0, 1, 0, 0] = torch.nan
    operator = call.operator(arrangement)
    shares = operator.shares
    assert operator.cells[shares.isnan()].tolist() == [0] * 4
    assert int(shares.isnan().sum()) == 4
    assert not shares.flatten(0, -2)[0].isnan().any()


def test_points_of_a_sampled_call_are_copied() -> None:
    call, arrangement, weights, points = sampled()
    assert [id(source) for source in call.sources()] == [id(call.weights), *map(id, points)]
    call.keep(values=True)
    expected = spread(weights, *points)
    for point in points:
        point.zero_()
    assert torch.allclose(call.operator(arrangement).block(0)[0].double(), expected, atol=1e-6)
    assert not hasattr(call, "value")
    base: Call = call
    assert base.values(arrangement) is None
    assert base.source(arrangement) is None
    other, _, _, _ = sampled()
    other.keep(False)
    assert len(other.sources()) == 1


# --- kinds of calls

METHODS = ("operator", "source", "weigh", "mix", "sources")


@pytest.mark.parametrize("missing", [*METHODS, ""])
def test_kind_of_call_must_say_all_of_its_weights(missing: str) -> None:
    kind: Any = type("Kind", (Call,), {name: lambda *_: None for name in METHODS if name != missing})
    if not missing:
        assert kind(torch.zeros(3, 5, 2), [3], 4).columns == 5
        return
    with pytest.raises(TypeError, match=missing):
        kind(torch.zeros(3, 5, 2), [3], 4)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
def test_sizes_are_those_of_the_last_axes(lead: tuple[int, ...]) -> None:
    query, key, value = torch.randn(*lead, 5, 4), torch.randn(*lead, 7, 4), torch.randn(*lead, 7, 6)
    call = FusedCall(query, key, value)
    assert (tuple(call.lead), call.rows, call.columns) == (lead, 5, 7)
    assert torch.allclose(call.mix(call.weigh()), (query @ key.mT / 2).softmax(-1) @ value, atol=1e-6)
    axes = Permuted(None, None, tuple(range(len(lead) + 2)))
    product = ProductCall(Product(call.weigh(), value, axes, 0, False))
    assert (tuple(product.lead), product.rows, product.columns) == (lead, 5, 7)
    shapes: list[Any] = []

    def take(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return torch.zeros(1, 1, 5, 7)

    arrangement: Any = SimpleNamespace(take=take)
    source = product.source(arrangement)
    assert source is not None
    source.gradient(torch.zeros(5, 7))
    assert shapes == [(*lead, 5, 7)]


@pytest.mark.parametrize("kind", ["fused", "product", "sampled"])
def test_only_what_weights_are_computed_from_is_kept_by_default(kind: str) -> None:
    call: Any = sampled()[0]
    if kind == "product":
        call = ProductCall(Product(torch.rand(2, 5, 7), torch.rand(2, 7, 3), Permuted(None, None, (0, 1, 2)), 0, False))
        call.scored = torch.rand(2, 5, 1), torch.rand(2, 1, 7)
    elif kind == "fused":
        call = FusedCall(*torch.rand(3, 2, 5, 4))
    call.out = torch.zeros(1)
    before = [source.clone() for source in call.sources()]
    call.keep()
    for source, copied in zip(call.sources(), before, strict=True):
        assert torch.equal(source, copied)
    assert (call.out, hasattr(call, "value"), getattr(call, "operand", None), getattr(call, "scored", None)) == (
        *(None, False),
        *(None, None),
    )


def test_bias_of_a_fused_call_is_arranged() -> None:
    asked: list[Any] = []

    def take_bias(bias: Tensor, lead: Any) -> Tensor:
        asked.append((bias, list(lead)))
        return bias + 1

    arrangement: Any = SimpleNamespace(
        order=None, query_index=None, key_index=None, take=lambda tensor: tensor, take_bias=take_bias
    )
    query, mask = torch.randn(2, 3, 5, 4), torch.randn(5, 5)
    operator = FusedCall(query, query, query, mask).operator(arrangement)
    assert operator.bias is not None
    assert torch.equal(operator.bias.reshape(5, 5), mask + 1)
    assert asked == [(mask, [2, 3])]
    assert FusedCall(query, query, query).operator(arrangement).bias is None
    assert len(asked) == 1


def test_row_may_be_hidden_in_one_head_of_one_image() -> None:
    query, mask = torch.randn(2, 3, 5, 4), torch.ones(2, 3, 5, 5, dtype=torch.bool)
    mask[0, 1, 2] = False
    sums = FusedCall(query, query, query, mask).weigh().sum(-1)
    expected = torch.ones(2, 3, 5)
    expected[0, 1, 2] = 0
    assert torch.allclose(sums, expected)


def test_gradient_of_fused_weights_is_that_of_the_result_times_the_values() -> None:
    query, value, of_out = torch.randn(2, 3, 5, 4), torch.randn(1, 3, 5, 6), torch.randn(2, 3, 5, 6)
    call = FusedCall(query, query, value)
    call.out = call.mix(call.weigh())
    arrangement: Any = SimpleNamespace(take=lambda tensor: tensor)
    source = call.source(arrangement)
    assert source.tensor is call.out
    gradient: Any = source.gradient(of_out)
    for batch in range(2):
        part = gradient.image(batch).part(0, slice(None), slice(None), torch.float32)
        assert torch.allclose(part.reshape(3, 5, 5), of_out[batch] @ value[0].mT, atol=1e-5)


# --- flex_attention

BATCH, HEADS, TOKENS, KEYS, WIDTH = 2, 4, 5, 7, 3


def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query + 2


def flexible(score: Any, mask: Any = visible, heads: int = HEADS, score_buffers: Any = (), mask_buffers: Any = ()) -> Any:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, HEADS, TOKENS, WIDTH, generator=generator)
    key, value = (torch.randn(BATCH, heads, KEYS, WIDTH, generator=generator) for _ in range(2))
    arguments: Any = (query, key, value, score, (None, mask), 0.7, {}, score_buffers, mask_buffers)
    return flex_call(arguments, {}, "layer")


def same(score: Tensor, *_: Tensor) -> Tensor:
    return score


def everything(_batch: Tensor, _head: Tensor, query: Tensor, _key: Tensor) -> Tensor:
    return query >= 0


def test_mask_of_a_flexible_call_becomes_a_bias() -> None:
    call = flexible(same)
    assert call.mask.shape == (1, 1, TOKENS, KEYS)
    expected = [[0.0 if key <= query + 2 else -torch.inf for key in range(KEYS)] for query in range(TOKENS)]
    assert call.mask[0, 0].tolist() == expected
    assert call.mask.dtype == torch.float32
    assert (call.groups, call.scale) == (1, 0.7)
    assert flexible(same, everything).mask is None


def test_bias_of_a_flexible_call_is_evaluated_at_all_indices() -> None:
    def biased(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, table: Tensor) -> Tensor:
        return score + 1000 * batch + 100 * head + 10 * query + key + table[query]

    table = torch.arange(5.0) / 8
    bias = flexible(biased, everything, score_buffers=(table,)).mask
    assert bias.shape == (BATCH, HEADS, TOKENS, KEYS)
    for index in ((0, 0, 0, 0), (1, 2, 3, 4), (1, 3, 4, 6), (0, 1, 0, 2)):
        batch, head, query, key = index
        assert float(bias[index]) == 1000 * batch + 100 * head + 10 * query + key + query / 8


def test_mask_of_a_flexible_call_may_read_tensors() -> None:
    def chosen(_batch: Tensor, head: Tensor, _query: Tensor, key: Tensor, keep: Tensor) -> Tensor:
        return keep[head, key]

    keep = (torch.arange(HEADS * KEYS) % 3 > 0).view(HEADS, KEYS)
    bias = flexible(same, chosen, mask_buffers=(keep,)).mask
    assert bias.shape == (1, HEADS, TOKENS, KEYS)
    assert torch.equal(bias == 0, keep[None, :, None].expand_as(bias))


def test_heads_of_keys_of_a_flexible_call_are_repeated() -> None:
    call = flexible(same, heads=2)
    assert call.groups == 2
    assert call.key.shape == call.value.shape == (BATCH, HEADS, KEYS, WIDTH)
    assert torch.equal(call.key[:, 0], call.key[:, 1])
    assert not torch.equal(call.key[:, 1], call.key[:, 2])


def test_scores_that_are_changed_otherwise_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"^layer: "):
        flexible(lambda score, *_: score * 2)
    with pytest.raises(UnsupportedModel):
        flexible(lambda score, *_: score * (1 + 1e-4))
    assert flexible(lambda score, *_: score * (1 + 1e-8), everything).mask is None


@pytest.mark.parametrize("score", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_not_finite_are_not_judged(score: float) -> None:
    query, key = torch.full((1, 1, 2, 1), score), torch.ones(1, 1, 3, 1)
    arguments: Any = (query, key, key, lambda score, *_: score * 2, (None, everything), 1.0, {})
    assert flex_call(arguments, {}, "layer").mask is None


def test_bias_has_size_one_where_it_is_constant() -> None:
    bias = torch.arange(TOKENS * KEYS, dtype=torch.float32).view(1, 1, TOKENS, KEYS)
    whole = bias.expand(BATCH, HEADS, TOKENS, KEYS).clone()
    shrunk = _shrunk(whole)
    assert shrunk is not None
    assert shrunk.shape == (1, 1, TOKENS, KEYS)
    whole[1] += 1
    assert getattr(_shrunk(whole), "shape", None) == (BATCH, 1, TOKENS, KEYS)
    whole[:, 3] += 1
    assert getattr(_shrunk(whole), "shape", None) == (BATCH, HEADS, TOKENS, KEYS)
    whole[1] -= 1
    assert getattr(_shrunk(whole), "shape", None) == (1, HEADS, TOKENS, KEYS)
    assert _shrunk(torch.zeros(BATCH, HEADS, TOKENS, KEYS)) is None
