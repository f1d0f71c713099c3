"""Axes of products of weights and values: which are images and heads, queries, keys and channels, and how results come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.core.capturing.intercept import written_out
from visattn.core.capturing.intercept.written_out import Product, product_of, sum_of
from visattn.core.capturing.trace.lettered_axes import axes_of_letters, axes_of_sum
from visattn.core.capturing.trace.product_axes import Grouped, Permuted

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 3, 5, 7, 4


def whole(*sizes: int) -> Tensor:
    """Return different whole numbers, whose products and sums are exact."""
    return torch.arange(torch.Size(sizes).numel(), dtype=torch.float64).reshape(sizes) % 11 + 1


def is_operand(number: int) -> Any:
    return lambda index, _: index == number


def product(call: Any, *args: Any, weights: int = 0, **kwargs: Any) -> Product | None:
    return product_of(call, args, kwargs, is_operand(weights))


def assert_repeats(found: Product | None, made: Tensor) -> None:
    """Check that the axes of a product give the result that the model computed."""
    assert found is not None
    weights, values = found.axes.weights(found.operand), found.axes.values(found.value)
    assert torch.equal(found.axes.result(weights @ values), made)


# --- sums over an elementwise product


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [(3,), (-2,)])
def test_sum_over_the_keys_is_a_product(dims: tuple[int, ...], keepdim: bool) -> None:
    weights, values = whole(BATCH, HEADS, QUERIES, KEYS, 1), whole(BATCH, HEADS, 1, KEYS, WIDTH)
    axes = axes_of_sum(weights, values, dims, keepdim=keepdim)
    assert axes is not None
    assert (axes.lead, axes.rows, axes.keys, axes.channels) == ((BATCH, HEADS), (QUERIES,), (KEYS,), (WIDTH,))
    assert axes.weights(weights).shape == (BATCH, HEADS, QUERIES, KEYS)
    assert axes.values(values).shape == (BATCH, HEADS, KEYS, WIDTH)
    assert torch.equal(axes.weights(weights), weights[..., 0])
    assert torch.equal(axes.values(values), values[:, :, 0])
    made = (weights * values).sum(dims, keepdim=keepdim)
    assert axes.out_shape == made.shape
    assert torch.equal(axes.result(axes.weights(weights) @ axes.values(values)), made)


def test_sum_over_two_axes_of_keys_between_the_channels_is_a_product() -> None:
    weights, values = whole(1, QUERIES, BATCH, KEYS), whole(WIDTH, 1, BATCH, KEYS)
    axes = axes_of_sum(weights, values, (3, 2), keepdim=False)
    assert axes is not None
    assert (axes.lead, axes.rows, axes.keys, axes.channels) == ((), (QUERIES,), (BATCH, KEYS), (WIDTH,))
    made = (weights * values).sum((2, 3))
    assert axes.out_shape == (WIDTH, QUERIES)
    assert axes.out_axes == (1, 0)
    assert torch.equal(axes.result(axes.weights(weights) @ axes.values(values)), made)


def test_operands_with_fewer_axes_are_aligned_at_the_last() -> None:
    weights, values = whole(KEYS, 1), whole(BATCH, KEYS, WIDTH)
    assert axes_of_sum(weights, values, (1,), keepdim=False) is not None
    axes = axes_of_sum(whole(BATCH, QUERIES, KEYS, 1), whole(KEYS, WIDTH), (2,), keepdim=False)
    assert axes is not None
    assert axes.value_shape == (1, 1, KEYS, WIDTH)
    assert (axes.lead, axes.rows, axes.channels) == ((), (BATCH, QUERIES), (WIDTH,))


def test_sum_over_an_axis_that_only_one_operand_has_is_no_product() -> None:
    assert axes_of_sum(whole(BATCH, QUERIES, 1, 1), whole(BATCH, 1, KEYS, WIDTH), (2,), keepdim=False) is None
    assert axes_of_sum(whole(BATCH, QUERIES, KEYS, 1), whole(BATCH, 1, 1, WIDTH), (2,), keepdim=False) is None


@pytest.mark.parametrize(("keys", "is_product"), [(1, False), (2, True)])
def test_a_product_sums_over_two_keys_or_more(keys: int, is_product: bool) -> None:
    axes = axes_of_sum(whole(BATCH, QUERIES, keys, 1), whole(BATCH, 1, keys, WIDTH), (2,), keepdim=False)
    assert (axes is not None) == is_product


def test_sum_without_an_axis_of_channels_is_no_product() -> None:
    assert axes_of_sum(whole(BATCH, QUERIES, KEYS), whole(BATCH, QUERIES, KEYS), (2,), keepdim=False) is None
    assert axes_of_sum(whole(BATCH, QUERIES, KEYS), whole(BATCH, 1, KEYS), (2,), keepdim=False) is None


SUM_CALLS: dict[str, tuple[tuple[Any, ...], Mapping[str, Any], bool]] = {
    "a number": ((-2,), {}, False),
    "a list": (([-2],), {}, False),
    "a tuple by name": ((), {"dim": (3,)}, False),
    "by the name of NumPy": ((), {"axis": 3, "keepdims": True}, True),
    "kept": ((-2, True), {}, True),
}


@pytest.mark.parametrize("name", list(SUM_CALLS))
@pytest.mark.parametrize("side", [0, 1])
def test_sum_is_read_however_its_axes_are_given(name: str, side: int) -> None:
    given, kwargs, _ = SUM_CALLS[name]
    weights, values = whole(BATCH, HEADS, QUERIES, KEYS, 1), whole(BATCH, HEADS, 1, KEYS, WIDTH)
    factors = (weights, values) if side == 0 else (values, weights)
    multiplied = weights * values
    found = sum_of(Tensor.sum, (multiplied, *given), kwargs, factors, is_operand(side))
    assert found is not None
    assert found.operand is weights
    assert found.value is values
    assert found.position == side
    assert found.doubtful
    assert found.samples == {}
    made = multiplied.sum(*given, **kwargs)
    assert_repeats(found, made)


@pytest.mark.parametrize(
    ("call", "given", "kwargs"),
    [
        (torch.mean, (3,), {}),
        (torch.sum, (), {}),
        (torch.sum, (3,), {"dtype": torch.float64}),
        (torch.sum, ((2,),), {}),
    ],
)
def test_other_reductions_are_no_products(call: Any, given: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    weights, values = whole(BATCH, HEADS, QUERIES, KEYS, 1), whole(BATCH, HEADS, 1, KEYS, WIDTH)
    assert sum_of(call, (weights * values, *given), kwargs, (weights, values), is_operand(0)) is None


def test_sum_of_factors_that_are_no_weights_is_no_product() -> None:
    weights, values = whole(BATCH, QUERIES, KEYS, 1), whole(BATCH, 1, KEYS, WIDTH)
    assert sum_of(torch.sum, (weights * values, 2), {}, (weights, values), lambda *_: False) is None


# --- einsum

PERMUTED = ["bhqk,bhkd->bhqd", "bqhk,bkhd->bhqd", "kqb,bdk->dqb", "qk,kd->qd", "bhqk,kdhb->qbdh"]
GROUPED = ["bk,bkd->bd", "bqkl,bkld->bqd", "bhqk,bkdh->bqhd", "bqrk,bkd->bdqr", "bqk,bkcd->bcqd", "qrkl,lkcd->cqdr"]
SIZES = {"b": BATCH, "h": HEADS, "q": QUERIES, "k": KEYS, "d": WIDTH, "l": 3, "r": 2, "c": 3}


def shaped(letters: str) -> Tensor:
    return whole(*(SIZES[letter] for letter in letters))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("equation", PERMUTED + GROUPED)
def test_einsum_is_repeated_by_its_axes(equation: str, side: int) -> None:
    operands, result = equation.split("->")
    weight_letters, value_letters = operands.split(",")
    weights, values = shaped(weight_letters), shaped(value_letters)
    text = equation if side == 0 else f"{value_letters},{weight_letters}->{result}"
    given = (weights, values) if side == 0 else (values, weights)
    found = product(torch.einsum, text, *given, weights=side)
    assert found is not None
    assert found.operand is weights
    assert found.value is values
    assert found.position == side
    is_grouped = any(len(axes) != 1 for axes in _axes_of(weight_letters, value_letters, result))
    assert isinstance(found.axes, Grouped) == is_grouped
    assert found.doubtful == (is_grouped or len(weight_letters) == 2)
    assert_repeats(found, torch.einsum(text, *given))


def _axes_of(weight: str, value: str, result: str) -> tuple[set[str], set[str], set[str]]:
    """Return the letters of queries, keys and channels."""
    return set(weight) - set(value), (set(weight) & set(value)) - set(result), set(value) - set(weight)


@pytest.mark.parametrize(
    "equation", ["bqk,bkd->bqkd", "bqk,bqk->bq", "bqk,bkd->bd", "bqk,bkd->bq", "bqk,bk->bq", "bqk,bqd->bkqd"]
)
def test_einsum_that_is_no_weighted_mean_is_no_product(equation: str) -> None:
    operands, _ = equation.split("->")
    assert product(torch.einsum, equation, *map(shaped, operands.split(","))) is None


def test_grouped_einsum_does_not_repeat_an_axis_of_size_one() -> None:
    weights, values = whole(BATCH, KEYS), whole(1, KEYS, WIDTH)
    assert axes_of_letters(("bk", weights), ("bkd", values), "bd") is None
    assert axes_of_letters(("bk", weights), ("bkd", whole(BATCH, KEYS, WIDTH)), "bd") is not None


def test_einsum_of_other_numbers_of_operands_is_no_product() -> None:
    weights, values = shaped("bqk"), shaped("bkd")
    assert product(torch.einsum, "bqk,bkd,bd->bqd", weights, values, shaped("bd")) is None
    assert product(torch.einsum, "bqk->bq", weights) is None
    assert product(torch.einsum, "bqk,bkd->bqd", weights, values, weights=2) is None
    assert product(torch.einsum, "bqk,bkd->bqd", weights, "no tensor") is None


# --- products of matrices


@pytest.mark.parametrize("lead", [(), (BATCH,), (BATCH, HEADS)])
def test_weights_may_be_the_first_matrix(lead: tuple[int, ...]) -> None:
    weights, values = whole(*lead, QUERIES, KEYS), whole(*lead, KEYS, WIDTH)
    found = product(torch.matmul, weights, values)
    assert found is not None
    assert found.position == 0
    assert found.doubtful == (not lead)
    assert found.axes == Permuted(None, None, tuple(range(len(lead) + 2)))
    assert found.operand is weights
    assert_repeats(found, weights @ values)


@pytest.mark.parametrize("lead", [(), (BATCH,), (BATCH, HEADS)])
def test_weights_may_be_the_second_matrix(lead: tuple[int, ...]) -> None:
    values, weights = whole(*lead, WIDTH, KEYS), whole(*lead, KEYS, QUERIES)
    found = product(torch.matmul, values, weights, weights=1)
    assert found is not None
    assert found.position == 1
    assert found.doubtful == (not lead)
    assert found.operand is weights
    assert found.value is values
    assert found.axes.weights(weights).shape == (*lead, QUERIES, KEYS)
    assert found.axes.values(values).shape == (*lead, KEYS, WIDTH)
    assert_repeats(found, values @ weights)


def test_weights_without_images_multiply_values_of_images() -> None:
    weights, values = whole(QUERIES, KEYS), whole(BATCH, KEYS, WIDTH)
    found = product(torch.matmul, weights, values)
    assert found is not None
    assert found.doubtful
    assert found.axes == Permuted(None, None, (0, 1, 2))
    turned = product(torch.matmul, values.mT, weights.mT, weights=1)
    assert turned is not None
    assert turned.doubtful
    assert turned.axes == Permuted((1, 0), (0, 2, 1), (0, 2, 1))


@pytest.mark.parametrize(
    ("left", "right", "weights"),
    [
        ((BATCH, QUERIES, KEYS), (KEYS, WIDTH), 0),  # a matrix of learned numbers
        ((WIDTH, KEYS), (BATCH, KEYS, QUERIES), 1),
        ((KEYS,), (BATCH, KEYS, WIDTH), 0),  # a vector has no queries
        ((BATCH, WIDTH, KEYS), (KEYS,), 1),
        ((QUERIES, KEYS), (KEYS,), 0),
    ],
)
def test_matrix_or_vector_of_the_model_is_no_operand(left: tuple[int, ...], right: tuple[int, ...], weights: int) -> None:
    assert product(torch.matmul, whole(*left), whole(*right), weights=weights) is None


def test_operands_are_found_by_name() -> None:
    weights, values = whole(BATCH, QUERIES, KEYS), whole(BATCH, KEYS, WIDTH)
    found = product_of(torch.bmm, (weights,), {"mat2": values}, is_operand(0))
    assert found is not None
    assert found.value is values


def test_other_calls_are_no_products() -> None:
    weights, values = whole(BATCH, QUERIES, KEYS), whole(BATCH, KEYS, WIDTH)
    assert product(torch.add, weights, weights) is None
    assert product(F.linear, weights, values) is None
    assert product(torch.matmul, weights, values, weights=2) is None
    assert product(Tensor.__matmul__, weights, 3) is None
    assert product(Tensor.__matmul__, 3, values, weights=1) is None


# --- einsums that mix heads, and gates


def tracer(weights: Sequence[Tensor], of_image: Sequence[Tensor]) -> Any:
    """Return a stand-in for a tracer whose tape has these weights, and these tensors that depend on the image."""
    tensors = [*weights, *of_image]

    def slot_of(tensor: Tensor) -> int | None:
        return next((slot for slot, other in enumerate(tensors) if other is tensor), None)

    tape = SimpleNamespace(weights={slot: frozenset({0}) for slot in range(len(weights))}, entries=[])
    return SimpleNamespace(slot_of=slot_of, tape=tape, descends=lambda tensor: any(tensor is other for other in tensors))


def test_einsum_with_learned_factors_mixes_heads() -> None:
    weights, factors = whole(BATCH, HEADS, QUERIES, KEYS), whole(HEADS, HEADS)
    mixes = written_out._mixes_heads
    args = ("bhqk,hg->bgqk", weights, factors)
    assert mixes(tracer([weights], []), args, whole(BATCH, HEADS, QUERIES, KEYS))
    assert mixes(tracer([weights], []), args, whole(HEADS, QUERIES, KEYS))
    assert not mixes(tracer([weights], []), args, whole(QUERIES, KEYS))
    assert not mixes(tracer([weights], []), args, whole(BATCH, HEADS, KEYS, QUERIES))
    assert not mixes(tracer([weights], []), args, whole(BATCH, HEADS, QUERIES, WIDTH))
    assert not mixes(tracer([weights], []), args, whole(BATCH, HEADS, WIDTH, KEYS))
    assert not mixes(tracer([weights], [factors]), args, weights)
    assert not mixes(tracer([weights, factors], []), args, weights)
    assert not mixes(tracer([], []), args, weights)


def test_weights_times_data_of_equal_size_are_a_gate() -> None:
    weights, data = whole(BATCH, QUERIES, KEYS), whole(BATCH, QUERIES, KEYS)
    is_gated = written_out._is_gated
    assert is_gated(tracer([weights], [data]), (weights, data), weights * data)
    assert not is_gated(tracer([weights], []), (weights, data), weights * data)
    assert not is_gated(tracer([weights, data], []), (weights, data), weights * data)
    assert not is_gated(tracer([weights], [data]), (weights, 2.0), weights * 2)
    assert not is_gated(tracer([weights], [data]), (weights, data), data)
    smaller = whole(BATCH, QUERIES, 1)
    assert not is_gated(tracer([weights], [smaller]), (weights, smaller), weights * smaller)
    one, other = whole(1, 1), whole(1, 1)
    assert not is_gated(tracer([one], [other]), (one, other), one * other)
    pair, data_of_pair = whole(1, 2), whole(1, 2)
    assert is_gated(tracer([pair], [data_of_pair]), (pair, data_of_pair), pair * data_of_pair)


@pytest.mark.parametrize(
    ("name", "positive"), [("exp", True), ("sigmoid", True), ("softplus", False), ("tanh", False), ("mul", False)]
)
def test_weights_times_positive_data_stay_weights(name: str, positive: bool) -> None:
    weights, data = whole(BATCH, QUERIES, KEYS), whole(BATCH, QUERIES, KEYS)
    operation, others = SimpleNamespace(own=True, name=name), SimpleNamespace(own=True, name="exp")
    entries = [
        SimpleNamespace(operation=operation, outs=[None, SimpleNamespace(slot=1)]),
        SimpleNamespace(operation=others, outs=[SimpleNamespace(slot=0)]),
    ]
    some = tracer([weights], [data])
    some.tape.entries = entries
    assert written_out._is_gated(some, (weights, data), weights * data) is not positive
    operation.own = False  # a function of the user's that has the same name
    assert written_out._is_gated(some, (weights, data), weights * data)
