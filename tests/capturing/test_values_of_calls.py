"""Attention calls with their operands: weights, bias, log-sum-exp, copies, and what is kept after the call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.core.capturing.finite import _operands, _refuse, are_finite
from visattn.core.capturing.intercept.calls import FusedCall, ProductCall, _broadcast_lead, own
from visattn.core.capturing.intercept.written_out import Product
from visattn.core.capturing.trace.product_axes import Permuted
from visattn.core.operators import MatrixOperator
from visattn.errors import CaptureError

BATCH, HEADS, QUERIES, KEYS, WIDTH, CHANNELS = 2, 3, 5, 7, 4, 6


def normal(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def operands(queries: int = QUERIES) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(BATCH, HEADS, queries, WIDTH, seed=1),
        normal(BATCH, HEADS, KEYS, WIDTH, seed=2),
        normal(BATCH, HEADS, KEYS, CHANNELS, seed=3),
    )


def plain_arrangement() -> Any:
    """Return an arrangement that leaves all axes as they are."""
    same = SimpleNamespace(order=None, query_index=None, key_index=None)
    same.take, same.take_bias = (lambda tensor: tensor), (lambda bias, _lead: bias)
    return same


# --- fused calls


def test_sizes_of_a_fused_call_are_those_of_its_operands() -> None:
    query, key, value = operands()
    call = FusedCall(query, key, value)
    assert (call.rows, call.columns, list(call.lead), call.groups) == (QUERIES, KEYS, [BATCH, HEADS], 1)
    assert call.sources() == (query, key)
    assert (call.out, call.lse, call.mask, call.is_causal, call.scale) == (None, None, None, False, None)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_weights_of_a_fused_call_give_its_result(scale: float | None) -> None:
    query, key, value = operands()
    mask = normal(1, HEADS, QUERIES, KEYS, seed=4)
    for options in ({}, {"attn_mask": mask}, {"attn_mask": mask > 0}, {"is_causal": True}):
        call = FusedCall(query, key, value, scale=scale, **options)
        weights = call.weigh()
        assert weights.shape == (BATCH, HEADS, QUERIES, KEYS)
        expected = F.scaled_dot_product_attention(query, key, value, scale=scale, **options)
        assert torch.allclose(call.mix(weights), expected, atol=1e-6)


def test_row_without_visible_keys_has_zero_weights() -> None:
    query, key, value = operands()
    mask = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    mask[2] = False
    mask[3, 1:] = False
    weights = FusedCall(query, key, value, mask).weigh()
    assert not weights[:, :, 2].any()
    assert torch.equal(weights[0, 0, 3], torch.tensor([1.0] + [0.0] * (KEYS - 1)))
    assert torch.allclose(weights[:, :, [0, 1, 4]].sum(-1), torch.ones(()))


def test_bias_of_a_mask_hides_keys() -> None:
    call = FusedCall(*operands())
    assert call._bias() is None
    call.is_causal = True
    bias = call._bias()
    assert bias is not None
    assert bias.dtype == torch.float32
    assert bias.tolist() == [[0.0 if key <= query else -torch.inf for key in range(KEYS)] for query in range(QUERIES)]
    numbers = FusedCall(*operands(), normal(QUERIES, KEYS))
    assert numbers._bias() is numbers.mask


def test_heads_of_keys_are_repeated_only_if_asked() -> None:
    query, key, value = normal(BATCH, 6, QUERIES, WIDTH), normal(BATCH, 3, KEYS, WIDTH), normal(BATCH, 3, KEYS, CHANNELS)
    call = FusedCall(query, key, value, enable_gqa=True)
    assert call.groups == 2
    assert torch.equal(call.key, key[:, [0, 0, 1, 1, 2, 2]])
    assert torch.equal(call.value, value[:, [0, 0, 1, 1, 2, 2]])
    assert list(call.lead) == [BATCH, 6]
    one = FusedCall(*operands(), enable_gqa=True)
    assert (one.groups, one.key.shape[1]) == (1, HEADS)
    alone = FusedCall(normal(BATCH, 6, QUERIES, WIDTH), normal(BATCH, 1, KEYS, WIDTH), normal(BATCH, 1, KEYS, CHANNELS))
    assert (alone.groups, list(alone.lead), alone.key.shape[1]) == (1, [BATCH, 6], 1)


def test_lead_is_what_all_operands_broadcast_to() -> None:
    assert _broadcast_lead(torch.zeros(2, 1, 5, 4), torch.zeros(1, 3, 7, 4)) == torch.Size([2, 3])
    assert _broadcast_lead(torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 7, 4), torch.zeros(3, 7, 4)) == torch.Size([2, 3])
    assert _broadcast_lead(torch.zeros(3, 5, 4)) == torch.Size([3])
    assert _broadcast_lead(torch.zeros(5, 4), torch.zeros(7, 4)) == torch.Size([])


def log_sums(call: FusedCall) -> Tensor:
    """Return the log-sum-exp of each row, computed in a loop."""
    bias = call._bias()
    scale = WIDTH**-0.5 if call.scale is None else call.scale
    sums = torch.zeros(BATCH, HEADS, call.rows)
    for batch in range(BATCH):
        for head in range(HEADS):
            for row in range(call.rows):
                scores = call.key[batch, head] @ call.query[batch, head, row] * scale
                scores = scores if bias is None else scores + bias.expand(BATCH, HEADS, call.rows, KEYS)[batch, head, row]
                sums[batch, head, row] = scores.exp().sum().log()
    return sums


@pytest.mark.parametrize("kind", ["plain", "scaled", "masked", "one row of masks", "causal"])
def test_log_sum_exp_agrees_with_the_scores(kind: str) -> None:
    call = FusedCall(*operands())
    if kind == "scaled":
        call.scale = 0.9
    if kind in ("masked", "one row of masks"):
        call.mask = normal(BATCH, 1, QUERIES if kind == "masked" else 1, KEYS, seed=5)
    call.is_causal = kind == "causal"
    lse = log_sums(call)
    assert call.agrees(lse)
    for row in (0, QUERIES // 2, QUERIES - 1):
        wrong = lse.clone()
        wrong[1, 2, row] += 1e-3
        assert not call.agrees(wrong)
    for row in (1, 3):
        unchecked = lse.clone()
        unchecked[:, :, row] += 1
        assert call.agrees(unchecked)


def test_log_sum_exp_may_be_off_by_the_rounding_of_float32() -> None:
    call = FusedCall(torch.zeros(1, 1, 3, WIDTH), torch.zeros(1, 1, 1, WIDTH), torch.zeros(1, 1, 1, WIDTH))
    for error, agrees in ((1.9e-5, True), (2.1e-5, False)):
        assert call.agrees(torch.full((1, 1, 3), error)) == agrees
    far = FusedCall(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), torch.full((3, 1), 1000.0))
    for error, agrees in ((0.019, True), (0.0205, False)):
        assert far.agrees(torch.full((1, 1, 3), 1000 + error, dtype=torch.float64)) == agrees


def test_log_sum_exp_of_the_cpu_is_kept_unseen() -> None:
    call = FusedCall(*operands())
    wrong = torch.zeros(BATCH, HEADS, QUERIES)
    call.know(wrong)
    assert call.lse is wrong


def test_log_sum_exp_of_other_devices_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    call = FusedCall(*operands())
    lse: Any = SimpleNamespace(device=torch.device("meta"))
    for agrees in (False, True):
        monkeypatch.setattr(FusedCall, "agrees", lambda *_, answer=agrees: answer)
        call.know(lse)
        assert (call.lse is lse) == agrees


def test_operator_of_a_fused_call_computes_its_weights() -> None:
    call = FusedCall(*operands(), normal(QUERIES, KEYS, seed=6), scale=0.4)
    operator = call.operator(plain_arrangement())
    assert torch.equal(operator.query[:, :, 0], call.query)
    assert torch.equal(operator.key[:, :, 0], call.key)
    weights = call.weigh()
    call.lse = log_sums(call)
    for made in (operator, call.operator(plain_arrangement())):
        assert torch.allclose(made.block(0), weights, atol=1e-6)


# --- what is kept


def test_operands_of_a_fused_call_are_copied() -> None:
    call = FusedCall(*operands(), normal(QUERIES, KEYS))
    query, mask, value = call.query, call.mask, call.value
    call.out = value
    call.keep()
    assert call.query is not query
    assert torch.equal(call.query, query)
    assert call.mask is not mask
    assert call.lse is None
    kept: Any = call
    assert kept.out is None
    assert not hasattr(call, "value")
    assert call._own(value) is value


def test_values_and_graph_are_kept_only_if_asked() -> None:
    for wanted in (True, False):
        for values in (True, False):
            for graph in (True, False):
                call = FusedCall(*operands())
                out, value = call.value, call.value
                call.out = out
                call.keep(wanted, values=values, graph=graph)
                assert (call.query is None) == (call.key is None) == (not wanted)
                assert hasattr(call, "value") == (wanted and values)
                assert not (wanted and values) or (call.value is not value and torch.equal(call.value, value))
                assert (call.out is out) == (wanted and graph)


def test_copy_is_detached_and_dense() -> None:
    tensor = normal(QUERIES, KEYS).requires_grad_()
    copy = own(tensor.mT)
    assert not copy.requires_grad
    assert copy.is_contiguous()
    assert torch.equal(copy, tensor.mT)
    assert own(tensor.mT, torch.preserve_format).stride() == (1, KEYS)
    call = FusedCall(*operands())
    assert call._own(call.value) is not call.value


def test_operand_is_expanded_to_all_images_and_heads() -> None:
    call = FusedCall(*operands())
    small = normal(1, KEYS, WIDTH)
    assert call._expanded(small).shape == (BATCH, HEADS, KEYS, WIDTH)
    assert call._expanded(call.query) is call.query


# --- products


def written_out(**changes: Any) -> tuple[ProductCall, Tensor, Tensor]:
    """Return a call whose weights are stored with keys before queries and values with channels before keys."""
    weights, values = normal(BATCH, HEADS, KEYS, QUERIES), normal(BATCH, 1, CHANNELS, KEYS, seed=1)
    turned = (0, 1, 3, 2)
    product = Product(weights, values, Permuted(turned, turned, turned), 1, False)._replace(**changes)
    return ProductCall(product), weights, values


def test_product_call_has_the_axes_of_its_operands() -> None:
    call, weights, values = written_out()
    assert (call.rows, call.columns, list(call.lead)) == (QUERIES, KEYS, [BATCH, HEADS])
    assert torch.equal(call.weights, weights.mT)
    assert torch.equal(call.weigh(), weights.mT)
    (source,) = call.sources()
    assert source is call.weights
    assert torch.allclose(call.mix(call.weigh()), values @ weights, atol=1e-5)
    assert call.mix(call.weigh().double()).dtype == torch.float32
    operator = call.operator(plain_arrangement())
    assert isinstance(operator, MatrixOperator)
    assert torch.equal(operator.weights[:, :, 0], weights.mT)
    assert operator.query is None


def test_gradient_of_a_product_has_the_axes_of_the_weights() -> None:
    call, weights, _ = written_out()
    source = call.source(plain_arrangement())
    assert source is not None
    assert source.tensor is weights
    of_weights = normal(1, HEADS, KEYS, QUERIES)
    gradient = source.gradient(of_weights)
    for batch in range(BATCH):
        part = gradient.image(batch).part(0, slice(None), slice(None), torch.float32)
        assert torch.equal(part, of_weights.mT)


def test_gradient_operand_of_a_product_is_kept_only_with_its_graph() -> None:
    for wanted, graph in ((True, True), (True, False), (False, True), (False, False)):
        call, weights, _ = written_out()
        call.keep(wanted, graph=graph)
        assert (call.operand is weights) == (wanted and graph)
        assert (call.weights is None) == (not wanted)


def test_operands_of_scores_are_copied_with_the_values() -> None:
    scored = normal(BATCH, QUERIES, WIDTH), normal(BATCH, WIDTH, KEYS)
    for wanted, values in ((True, True), (True, False), (False, True)):
        call, _, _ = written_out()
        call.scored = scored
        call.keep(wanted, values=values)
        if wanted and values:
            assert call.scored is not None
            assert all(
                copy is not operand and torch.equal(copy, operand) for copy, operand in zip(call.scored, scored, strict=True)
            )
        else:
            assert call.scored is None
    unscored, _, _ = written_out()
    unscored.keep(values=True)
    assert unscored.scored is None


def test_queries_and_keys_are_parts_of_the_operands_of_the_scores() -> None:
    call, _, _ = written_out()
    query, key = normal(BATCH, HEADS, QUERIES, WIDTH), normal(1, KEYS, WIDTH)
    vectors: Any = [SimpleNamespace(of=lambda parts: parts[0]), SimpleNamespace(of=lambda parts: parts[1])]
    call.scored = query, key
    operator = call.operator(plain_arrangement(), vectors)
    assert isinstance(operator, MatrixOperator)
    assert operator.query is not None
    assert operator.key is not None
    assert torch.equal(operator.query[:, :, 0], query)
    assert operator.key.shape == (BATCH, HEADS, 1, KEYS, WIDTH)
    without: Any = call.operator(plain_arrangement())
    assert without.query is without.key is None
    call.scored = None
    unscored: Any = call.operator(plain_arrangement(), vectors)
    assert unscored.query is None


# --- values that are not finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_tensorsare_finite_if_their_norm_is(dtype: torch.dtype) -> None:
    tensors = [torch.ones(3, dtype=dtype), torch.arange(3), torch.zeros(0, dtype=dtype), torch.ones(2, 2).double()]
    assert are_finite([])
    assert are_finite(tensors)
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not are_finite([*tensors, torch.tensor([1, bad], dtype=dtype)])


def test_values_that_are_not_finite_are_counted() -> None:
    _refuse("{} values", torch.ones(3))
    _refuse("{} values", torch.arange(3))
    _refuse("{} values", torch.full((2,), 3e38))  # finite, but their norm is not
    with pytest.raises(CaptureError, match=r"^3 values are NaN or infinite"):
        _refuse("{} values", torch.tensor([torch.nan, 1, torch.inf, -torch.inf]))
    with pytest.raises(CaptureError, match=r"^1 values"):
        _refuse("{} values", torch.tensor([torch.inf, 1]))
    weights = torch.zeros(1, 1, 2, 3)
    assert [(name, tensor.shape.numel()) for name, tensor in _operands(MatrixOperator(weights)).items()] == [("weight", 6)]
