from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.conftest import Figures
from tests.oracles import maps as oracles
from tests.tiny import operands
from visattn.core.operators import (
    MatrixGradient,
    MatrixOperator,
    Operator,
    OuterGradient,
    SampledOperator,
    SoftmaxOperator,
    SumOperator,
)
from visattn.core.operators.operator import ROWS
from visattn.errors import OptionError, ShapeError

INF = math.inf
BATCH, HEADS, DIM = 2, 2, 8
QUERIES, KEYS = 6, 11


@dataclass(frozen=True)
class Case:
    """An operator, and the float64 matrix that it must equal."""

    operator: Operator
    dense: oracles.Array
    leaked: oracles.Array


def noise(*shape: int, seed: int = 0, sharpness: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * sharpness


def case(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None = None,
    scale: float | None = None,
    query_index: Tensor | None = None,
    key_index: Tensor | None = None,
    tokens: tuple[int, int] = (QUERIES, KEYS),
) -> Case:
    """Build a softmax operator, and its matrix by nested loops over the same numbers."""
    operator = SoftmaxOperator(query, key, bias, scale, query_index, key_index)
    q, k = (oracles.array(x if x.ndim == 5 else x[:, :, None]) for x in (query, key))
    full = None
    if bias is not None:
        added = oracles.array(bias)
        if query.ndim == 4:
            added = added.reshape((1,) * (4 - added.ndim) + added.shape)[:, :, None]
        full = np.broadcast_to(added, (*q.shape[:4], k.shape[3]))
    weights = oracles.block_weights(q, k, full, query.shape[-1] ** -0.5 if scale is None else scale)
    rows = np.arange(tokens[0])[None] if query_index is None else query_index.numpy()
    columns = np.arange(tokens[1])[None] if key_index is None else key_index.numpy()
    dense = oracles.placed(weights, rows, columns, *tokens)
    return Case(operator, dense, oracles.to_padding(weights, rows, columns, tokens[0]))


def masked(*, whole_rows: bool) -> Tensor:
    """Build a bias with random -inf; optionally mask all of row 2."""
    bias = noise(1, HEADS, QUERIES, KEYS, seed=5)
    bias[noise(1, HEADS, QUERIES, KEYS, seed=6) > 0.5] = -INF
    bias[..., 0] = 0
    if whole_rows:
        bias[:, :, 2] = -INF
    return bias


def flat(bias: Tensor | None = None, scale: float | None = None, sharpness: float = 1.5, dim: int = DIM) -> Case:
    return case(
        noise(BATCH, HEADS, QUERIES, dim, seed=1, sharpness=sharpness), noise(BATCH, HEADS, KEYS, dim, seed=2), bias, scale
    )


# a grid of 5 x 7 in windows of 3 x 4: 35 tokens, 4 windows of 12 positions, 13 of which are padding
def windows() -> tuple[Tensor, Tensor]:
    """Build indices of shuffled queries and keys."""
    places = torch.full((6, 8), -1)
    places[:5, :7] = torch.arange(35).view(5, 7)
    index = places.view(2, 3, 2, 4).permute(0, 2, 1, 3).reshape(4, 12)
    shuffled = torch.stack([row[torch.randperm(12, generator=torch.Generator().manual_seed(i))] for i, row in enumerate(index)])
    return shuffled, index


def windowed(bias: Tensor | None = None) -> Case:
    query, key = noise(BATCH, HEADS, 4, 12, DIM, seed=1, sharpness=1.5), noise(BATCH, HEADS, 4, 12, DIM, seed=2)
    return case(query, key, bias, None, *windows(), tokens=(35, 35))


def permuted() -> Case:
    generator = torch.Generator().manual_seed(9)
    rows, columns = (torch.randperm(n, generator=generator)[None] for n in (QUERIES, KEYS))
    query, key = noise(BATCH, HEADS, QUERIES, DIM, seed=1), noise(BATCH, HEADS, KEYS, DIM, seed=2)
    return case(query, key, None, None, rows, columns)


SOFTMAX: dict[str, Callable[[], Case]] = {
    "plain": flat,
    "custom scale": lambda: flat(scale=0.7),
    "negative scale": lambda: flat(scale=-0.4),
    "head dim 5": lambda: flat(dim=5),
    "bias of each head": lambda: flat(noise(1, HEADS, QUERIES, KEYS, seed=3)),
    "bias of each image": lambda: flat(noise(BATCH, 1, QUERIES, KEYS, seed=3)),
    "bias of each key": lambda: flat(noise(BATCH, 1, 1, KEYS, seed=3)),
    "bias (Q, K)": lambda: flat(noise(QUERIES, KEYS, seed=3)),
    "bias (heads, Q, K)": lambda: flat(noise(HEADS, QUERIES, KEYS, seed=3)),
    "half-precision bias": lambda: flat(noise(1, HEADS, QUERIES, KEYS, seed=3).half()),
    "mask": lambda: flat(masked(whole_rows=False)),
    "mask of whole rows": lambda: flat(masked(whole_rows=True)),
    "mask of a whole key": lambda: flat(torch.zeros(1, 1, 1, KEYS).index_fill(3, torch.tensor([4]), -INF)),
    "one block permuted": permuted,
    "padded windows": windowed,
    "padded windows, bias of each head": lambda: windowed(noise(1, HEADS, 1, 12, 12, seed=3)),
    "padded windows, bias of each window": lambda: windowed(noise(1, 1, 4, 12, 12, seed=3)),
    "padded windows, bias with four axes": lambda: windowed(noise(HEADS, 1, 12, 12, seed=3)),
}


def explicit() -> Case:
    weights = noise(BATCH, HEADS, QUERIES, KEYS, seed=4)
    return Case(MatrixOperator(weights), oracles.array(weights), np.zeros((BATCH, HEADS, QUERIES)))


def explicit_windows() -> Case:
    weights, (rows, columns) = noise(BATCH, HEADS, 4, 12, 12, seed=4).softmax(-1), windows()
    dense = oracles.placed(oracles.array(weights), rows.numpy(), columns.numpy(), 35, 35)
    lost = oracles.to_padding(oracles.array(weights), rows.numpy(), columns.numpy(), 35)
    return Case(MatrixOperator(weights, rows, columns), dense, lost)


def sampled(*sizes: int, keys: int) -> tuple[Tensor, Tensor, oracles.Array]:
    """Build random entries, some of one cell twice, and the matrix that they add up to."""
    cells = torch.randint(keys, (BATCH, HEADS, *sizes, 5), generator=torch.Generator().manual_seed(6))
    shares = noise(BATCH, HEADS, *sizes, 5, seed=4)
    matrix = np.zeros((BATCH, HEADS, *sizes, keys))
    for at in np.ndindex(*cells.shape):
        matrix[(*at[:-1], int(cells[at]))] += float(shares[at])
    return cells, shares, matrix


def points() -> Case:
    cells, shares, matrix = sampled(QUERIES, keys=KEYS)
    return Case(SampledOperator(cells, shares, KEYS), matrix, np.zeros((BATCH, HEADS, QUERIES)))


def points_in_windows() -> Case:
    (cells, shares, matrix), (rows, columns) = sampled(4, 12, keys=12), windows()
    dense = oracles.placed(matrix, rows.numpy(), columns.numpy(), 35, 35)
    lost = oracles.to_padding(matrix, rows.numpy(), columns.numpy(), 35)
    return Case(SampledOperator(cells, shares, 12, rows, columns), dense, lost)


def difference() -> Case:
    first, second = flat(), flat(scale=0.2)
    factor = noise(1, HEADS, 1, 1, seed=8)
    operator = SumOperator([(1.0, first.operator), (-factor, second.operator)])
    return Case(operator, first.dense - oracles.array(factor) * second.dense, first.leaked)


def sum_of_windows() -> Case:
    first, second = windowed(), explicit_windows()
    operator = SumOperator([(0.25, first.operator), (0.75, second.operator)])
    return Case(operator, 0.25 * first.dense + 0.75 * second.dense, 0.25 * first.leaked + 0.75 * second.leaked)


ALL = SOFTMAX | {
    "explicit": explicit,
    "explicit in padded windows": explicit_windows,
    "sampled points": points,
    "sampled points in padded windows": points_in_windows,
    "difference": difference,
    "sum in padded windows": sum_of_windows,
}
EXACT: Any = {"atol": 2e-6, "rtol": 1e-5}
EXACT64: Any = {"atol": 1e-12, "rtol": 1e-11}

every = pytest.mark.parametrize("name", list(ALL))
every_softmax = pytest.mark.parametrize("name", list(SOFTMAX))


def together(tiles: Any, shape: tuple[int, ...]) -> Tensor:
    """Assemble the matrix from its tiles."""
    out = torch.zeros(shape)
    for tile in tiles:
        out[:, :, tile.queries[:, None], tile.keys] += tile.weights
    return out


# against nested loops


@every
def test_dense_equals_nested_loops(name: str) -> None:
    judged = ALL[name]()
    np.testing.assert_allclose(judged.operator.dense(), judged.dense, **EXACT)


@every
def test_dense_in_float64_equals_nested_loops_to_the_last_digits(name: str) -> None:
    judged = ALL[name]()
    result = judged.operator.to(torch.float64).dense()
    assert result.dtype == torch.float64
    np.testing.assert_allclose(result, judged.dense, **EXACT64)


@every
def test_shape_counts_the_tokens(name: str) -> None:
    judged = ALL[name]()
    assert judged.operator.shape == judged.dense.shape


@every
@pytest.mark.parametrize("queries", [[0], [5, 1, 3], [2, 2]], ids=["one", "any order", "twice"])
def test_rows_are_rows_of_the_matrix(name: str, queries: list[int]) -> None:
    judged = ALL[name]()
    np.testing.assert_allclose(judged.operator.rows(torch.tensor(queries)), judged.dense[:, :, queries], **EXACT)


@every
@pytest.mark.parametrize("keys", [[0], [5, 1, 3], [2, 2]], ids=["one", "any order", "twice"])
def test_columns_are_columns_of_the_matrix(name: str, keys: list[int]) -> None:
    judged = ALL[name]()
    np.testing.assert_allclose(judged.operator.columns(torch.tensor(keys)), judged.dense[:, :, :, keys], **EXACT)


@every
@pytest.mark.parametrize("rows", [1, 4, 5, 128], ids=lambda rows: f"{rows} rows")
def test_tiles_add_up_to_the_matrix(name: str, rows: int) -> None:
    judged = ALL[name]()
    np.testing.assert_allclose(together(judged.operator.tiles(rows), judged.operator.shape), judged.dense, **EXACT)


@every
def test_tiles_cover_each_query_once(name: str) -> None:
    operator = ALL[name]().operator
    queries = torch.cat([tile.queries for tile in operator.tiles(4)])
    assert queries.sort().values.tolist() == list(range(operator.shape[2]))


@every
def test_tiles_stay_valid_when_they_are_kept(name: str) -> None:
    judged = ALL[name]()
    kept = list(judged.operator.tiles(2))
    np.testing.assert_allclose(together(kept, judged.operator.shape), judged.dense, **EXACT)


@every_softmax
def test_kept_tiles_share_no_memory(name: str) -> None:
    tiles = list(SOFTMAX[name]().operator.tiles(2))
    assert len({tile.weights.untyped_storage().data_ptr() for tile in tiles}) == len(tiles) > 1


@every
def test_product_with_a_right_factor(name: str) -> None:
    judged = ALL[name]()
    x = noise(BATCH, HEADS, judged.operator.shape[3], 3, seed=7)
    np.testing.assert_allclose(judged.operator @ x, oracles.gathered(judged.dense, oracles.array(x)), atol=1e-5, rtol=1e-5)


@every
def test_product_with_a_left_factor(name: str) -> None:
    judged = ALL[name]()
    r = noise(BATCH, HEADS, 3, judged.operator.shape[2], seed=7)
    np.testing.assert_allclose(r @ judged.operator, oracles.drawn(judged.dense, oracles.array(r)), atol=1e-5, rtol=1e-5)


@every_softmax
@pytest.mark.parametrize("channels", [1, DIM + 3], ids=["one channel", "more channels than the head dim"])
def test_reversed_implementation_gives_the_same_product(name: str, channels: int) -> None:
    judged = SOFTMAX[name]()
    assert isinstance(judged.operator, SoftmaxOperator)
    r = noise(BATCH, HEADS, channels, judged.operator.shape[2], seed=7)
    result = judged.operator.pull(r, "reversed")
    np.testing.assert_allclose(result, oracles.drawn(judged.dense, oracles.array(r)), atol=1e-5, rtol=1e-5)


@every_softmax
def test_products_in_float64_equal_nested_loops_to_the_last_digits(name: str) -> None:
    judged = SOFTMAX[name]()
    operator = judged.operator.to(torch.float64)
    assert isinstance(operator, SoftmaxOperator)
    r = noise(BATCH, HEADS, 2, operator.shape[2], seed=7)
    expected = oracles.drawn(judged.dense, oracles.array(r))
    np.testing.assert_allclose(operator.pull(r, "tiles"), expected, **EXACT64)
    np.testing.assert_allclose(operator.pull(r, "reversed"), expected, **EXACT64)


@every
def test_factors_broadcast_over_batch_and_heads(name: str) -> None:
    judged = ALL[name]()
    r, x = noise(1, 1, 2, judged.operator.shape[2], seed=7), noise(1, 1, judged.operator.shape[3], 2, seed=8)
    np.testing.assert_allclose(r @ judged.operator, oracles.drawn(judged.dense, oracles.array(r)), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(judged.operator @ x, oracles.gathered(judged.dense, oracles.array(x)), atol=1e-5, rtol=1e-5)


@every
def test_leaked_is_the_weight_on_padding(name: str) -> None:
    judged = ALL[name]()
    np.testing.assert_allclose(judged.operator.leaked(), judged.leaked, **EXACT)


def test_padded_windows_do_leak() -> None:
    assert windowed().leaked.max() > 0.3


def test_padding_in_the_first_tile_does_not_shift_later_tiles() -> None:
    tokens = ROWS + 40
    index = torch.cat([torch.full((7,), -1), torch.arange(tokens)])[None]
    query, key = noise(1, 1, 1, tokens + 7, DIM, seed=1), noise(1, 1, 1, tokens + 7, DIM, seed=2)
    judged = case(query, key, None, None, index, index, tokens=(tokens, tokens))
    x = noise(1, 1, tokens, 2, seed=7)
    np.testing.assert_allclose(judged.operator @ x, oracles.gathered(judged.dense, oracles.array(x)), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(judged.operator.leaked(), judged.leaked, **EXACT)


def test_fully_masked_rows_are_zero_and_others_sum_to_one() -> None:
    sums = flat(masked(whole_rows=True)).operator.dense().sum(-1)
    expected = torch.ones(BATCH, HEADS, QUERIES)
    expected[:, :, 2] = 0
    torch.testing.assert_close(sums, expected)


def test_permuted_block_agrees_with_the_same_tokens_in_order() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, columns = torch.randperm(QUERIES, generator=generator), torch.randperm(KEYS, generator=generator)
    query, key = noise(BATCH, HEADS, QUERIES, DIM, seed=1), noise(BATCH, HEADS, KEYS, DIM, seed=2)
    in_order = SoftmaxOperator(query, key)
    shuffled = SoftmaxOperator(query[:, :, rows], key[:, :, columns], None, None, rows[None], columns[None])
    r, x = noise(BATCH, HEADS, 2, QUERIES, seed=7), noise(BATCH, HEADS, KEYS, 2, seed=7)
    torch.testing.assert_close(shuffled.dense(), in_order.dense())
    torch.testing.assert_close(r @ shuffled, r @ in_order)
    torch.testing.assert_close(shuffled.pull(r, "reversed"), in_order.pull(r, "reversed"))
    torch.testing.assert_close(shuffled @ x, in_order @ x)


# the kernel's own log-sum-exp


def exact_lse(query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    scores = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
    return torch.logsumexp(scores if bias is None else scores + bias, -1)


@pytest.mark.parametrize("implementation", ["tiles", "reversed"])
@pytest.mark.parametrize("name", ["plain", "mask"])
def test_given_log_sum_exp_changes_nothing(name: str, implementation: Any) -> None:
    operator = SOFTMAX[name]().operator
    assert isinstance(operator, SoftmaxOperator)
    query, key = operator.query[:, :, 0], operator.key[:, :, 0]
    bias = None if operator.bias is None else operator.bias[:, :, 0]
    told = SoftmaxOperator(query, key, bias, lse=exact_lse(query, key, bias).float())
    r = noise(BATCH, HEADS, 2, QUERIES, seed=7)
    torch.testing.assert_close(told.dense(), operator.dense(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(told.pull(r, implementation), operator.pull(r, implementation), atol=1e-6, rtol=1e-5)


def test_given_log_sum_exp_is_what_float32_weights_are_divided_by() -> None:
    query, key = noise(1, 1, 3, DIM), noise(1, 1, 3, DIM, seed=1)
    told = SoftmaxOperator(query, key, lse=exact_lse(query, key).float() + math.log(2))
    torch.testing.assert_close(told.dense().sum(-1), torch.full((1, 1, 3), 0.5))


def test_float64_does_not_trust_a_float32_log_sum_exp() -> None:
    query, key = noise(1, 1, 3, DIM), noise(1, 1, 3, DIM, seed=1)
    told = SoftmaxOperator(query, key, lse=exact_lse(query, key).float() + 1e-3)
    sums = told.to(torch.float64).dense().sum(-1)
    torch.testing.assert_close(sums, torch.ones(1, 1, 3, dtype=torch.float64), atol=1e-12, rtol=0)


# numbers


def spread(dtype: torch.dtype) -> SoftmaxOperator:
    """Build rows whose log-sum-exp ranges from small values to above 60, for 35 + 1 tokens."""
    query, key = noise(1, HEADS, 36, 16, seed=1), noise(1, HEADS, 36, 16, seed=2)
    size = exact_lse(query, key).clamp_min(0.5)
    wanted = torch.linspace(1, 62, 36, dtype=torch.float64)
    factor = wanted / size
    for _ in range(20):  # the log-sum-exp is not linear in the scale
        factor *= wanted / exact_lse(query.double() * factor[..., None], key)
    return SoftmaxOperator((query * factor[..., None]).to(dtype), key.to(dtype))


@pytest.mark.parametrize("product", ["dense", "r @ A by tiles", "r @ A reversed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def test_low_precision_operands_are_computed_exactly(dtype: torch.dtype, product: str, figures: Figures) -> None:
    operator = spread(dtype)
    query, key = operator.query[:, :, 0], operator.key[:, :, 0]
    largest = float(exact_lse(query, key).max())
    assert 60 < largest < 70
    exact = torch.stack([oracles.head_matrix(q, k) for q, k in zip(query[0], key[0], strict=True)])[None]
    r = torch.rand(1, 1, 2, 36, generator=torch.Generator().manual_seed(4))
    if product == "dense":
        error = operator.dense() - exact
    else:
        error = operator.pull(r, "tiles" if product.endswith("tiles") else "reversed") - r.double() @ exact
    worst = float(error.abs().max())
    name = str(dtype).removeprefix("torch.")
    figures(f"operator, {name} q and k, log-sum-exp up to {largest:.0f}: {product}, worst error", worst, "<= 1e-4")
    assert worst <= 1e-4


@pytest.mark.parametrize("product", ["dense", "right", "tiles", "reversed"])
def test_autocast_around_changes_nothing(product: str) -> None:
    operator = flat().operator
    assert isinstance(operator, SoftmaxOperator)
    r, x = noise(BATCH, HEADS, 2, QUERIES, seed=7), noise(BATCH, HEADS, KEYS, 2, seed=7)
    compute: dict[str, Callable[[], Tensor]] = {
        "dense": operator.dense,
        "right": lambda: operator @ x,
        "tiles": lambda: operator.pull(r, "tiles"),
        "reversed": lambda: operator.pull(r, "reversed"),
    }
    plain = compute[product]()
    with torch.autocast("cpu", torch.bfloat16):
        under = compute[product]()
    assert torch.equal(under, plain)


@pytest.mark.parametrize("kind", ["explicit", "difference"])
def test_autocast_around_other_operators_changes_nothing(kind: str) -> None:
    operator = ALL[kind]().operator
    r = noise(BATCH, HEADS, 2, QUERIES, seed=7)
    plain = r @ operator, operator.dense()
    with torch.autocast("cpu", torch.bfloat16):
        under = r @ operator, operator.dense()
    assert torch.equal(under[0], plain[0])
    assert torch.equal(under[1], plain[1])


def test_results_do_not_require_gradients() -> None:
    query, key = noise(1, HEADS, QUERIES, DIM).requires_grad_(), noise(1, HEADS, KEYS, DIM)
    assert not SoftmaxOperator(query, key).dense().requires_grad


def test_operands_are_not_changed() -> None:
    operator = flat(masked(whole_rows=True)).operator
    assert isinstance(operator, SoftmaxOperator)
    assert operator.bias is not None
    before = [x.clone() for x in (operator.query, operator.key, operator.bias)]
    _ = operator.dense(), operator.pull(noise(1, 1, 1, QUERIES), "reversed"), operator @ noise(1, 1, KEYS, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, (operator.query, operator.key, operator.bias), strict=True))


@settings(derandomize=True, max_examples=15, deadline=None)
@given(
    queries=st.integers(1, 9), keys=st.integers(1, 9), dim=st.integers(1, 9), sharpness=st.floats(0, 8), seed=st.integers(0, 99)
)
def test_any_sizes_agree_with_nested_loops(queries: int, keys: int, dim: int, sharpness: float, seed: int) -> None:
    query, key = noise(1, 2, queries, dim, seed=seed, sharpness=sharpness), noise(1, 2, keys, dim, seed=seed + 1)
    judged = case(query, key, tokens=(queries, keys))
    assert isinstance(judged.operator, SoftmaxOperator)
    r = noise(1, 1, 2, queries, seed=seed)
    np.testing.assert_allclose(judged.operator.dense(), judged.dense, **EXACT)
    expected = oracles.drawn(judged.dense, oracles.array(r))
    np.testing.assert_allclose(judged.operator.pull(r, "tiles"), expected, atol=2e-5)
    np.testing.assert_allclose(judged.operator.pull(r, "reversed"), expected, atol=2e-5)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), tokens=st.integers(1, 40))
def test_rows_of_a_softmax_sum_to_one(seed: int, tokens: int) -> None:
    operator = SoftmaxOperator(noise(1, 2, tokens, 4, seed=seed, sharpness=5), noise(1, 2, tokens, 4, seed=seed + 1))
    np.testing.assert_allclose(operator.dense().sum(-1), 1, atol=1e-5)


# refusals

q, k = noise(1, 2, 3, 4), noise(1, 2, 5, 4)
index = torch.arange(3)[None]
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no head axis": (lambda: SoftmaxOperator(q[0], k[0]), ShapeError, r"query and key must be .* got \(2, 3, 4\)"),
    "other head dim": (lambda: SoftmaxOperator(q, k[..., :3]), ShapeError, r"query and key must be .*\(1, 2, 5, 3\)"),
    "other batch": (lambda: SoftmaxOperator(q, k.expand(2, -1, -1, -1)), ShapeError, "query and key must be"),
    "blocks without indices": (
        lambda: SoftmaxOperator(q[:, :, None], k[:, :, None]),
        ShapeError,
        "need query_index and key_index",
    ),
    "one index": (lambda: SoftmaxOperator(q, k, query_index=index), ShapeError, "must be given together"),
    "index of other size": (
        lambda: SoftmaxOperator(q, k, query_index=index, key_index=index),
        ShapeError,
        r"an index must be \(blocks, tokens\) = \(1, 5\), got \(1, 3\)",
    ),
    "bias of other size": (lambda: SoftmaxOperator(q, k, noise(1, 1, 9, 9)), ShapeError, "bias must"),
    "bias with too many axes": (lambda: SoftmaxOperator(q, k, noise(1, 1, 1, 3, 5)), ShapeError, "bias must"),
    "half precision": (lambda: SoftmaxOperator(q, k, dtype=torch.float16), OptionError, "dtype must be .* got torch.float16"),
    "half precision later": (lambda: SoftmaxOperator(q, k).to(torch.bfloat16), OptionError, "dtype must be"),
    "half precision of weights": (lambda: MatrixOperator(k).to(torch.float16), OptionError, "dtype must be"),
    "weights without head axis": (
        lambda: MatrixOperator(k[0]),
        ShapeError,
        r"weights must be .* got \(2, 5, 4\). Add a batch axis",
    ),
    "weights in blocks without indices": (lambda: MatrixOperator(k[None]), ShapeError, "weights must be"),
    "empty sum": (lambda: SumOperator([]), ShapeError, "at least one term"),
    "sum of other shapes": (
        lambda: SumOperator([(1, MatrixOperator(q)), (1, MatrixOperator(k))]),
        ShapeError,
        "must share one shape",
    ),
    "sum of other orders": (
        lambda: SumOperator([(1, MatrixOperator(q)), (1, MatrixOperator(q, index, torch.arange(4)[None]))]),
        ShapeError,
        "must share one shape and token order",
    ),
    "right factor of other length": (lambda: SoftmaxOperator(q, k) @ q, ShapeError, r"x must be \(B, 1\|heads, K, C\)"),
    "right factor with three axes": (lambda: SoftmaxOperator(q, k) @ k[0], ShapeError, "x must be .* Add the missing axes"),
    "left factor of other length": (
        lambda: noise(1, 1, 1, 5) @ SoftmaxOperator(q, k),
        ShapeError,
        r"r must be \(B, 1\|heads, C, Q\)",
    ),
    "left factor of other batch": (lambda: noise(4, 1, 1, 3) @ SoftmaxOperator(q, k), ShapeError, "r must be"),
    "unknown implementation": (
        lambda: SoftmaxOperator(q, k).pull(noise(1, 1, 1, 3), "dense"),  # type: ignore[arg-type]
        OptionError,
        "'tiles' or 'reversed', got 'dense'",
    ),
    "reversed weights": (
        lambda: MatrixOperator(q).pull(noise(1, 1, 1, 3), "reversed"),
        OptionError,
        "MatrixOperator computes r @ A only with implementation='tiles'",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_operators_refuse(name: str) -> None:
    act, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        act()


def test_a_coefficient_of_each_head_stays_whole_for_one_image() -> None:
    heads = 3
    parts = [SoftmaxOperator(*operands(5, batch=heads, heads=heads, seed=seed)) for seed in range(2)]
    for coefficient in (torch.rand(heads, 1, 1), torch.rand(heads, heads, 1, 1)):
        whole = SumOperator([(1.0, parts[0]), (-coefficient, parts[1])])
        for number in range(heads):
            assert torch.allclose(whole.image(number).dense()[0], whole.dense()[number], atol=1e-6)


IMAGES, OF_HEADS, ROWS_OF, KEYS_OF = 3, 2, 5, 4  # all different, so that none stands for another


@pytest.mark.parametrize(
    "operator",
    [
        lambda: SampledOperator(
            torch.zeros(IMAGES, OF_HEADS, ROWS_OF, 6).long(), torch.rand(IMAGES, OF_HEADS, ROWS_OF, 6), KEYS_OF
        ),
        lambda: MatrixOperator(torch.rand(IMAGES, OF_HEADS, ROWS_OF, KEYS_OF).softmax(-1)),
        lambda: SoftmaxOperator(torch.rand(IMAGES, OF_HEADS, ROWS_OF, 7), torch.rand(IMAGES, OF_HEADS, KEYS_OF, 7)),
    ],
    ids=["sampled", "matrix", "softmax"],
)
def test_shape_counts_images_and_heads_apart(operator: Callable[[], Operator]) -> None:
    assert operator().shape == (IMAGES, OF_HEADS, ROWS_OF, KEYS_OF)
    assert operator().dense().shape == (IMAGES, OF_HEADS, ROWS_OF, KEYS_OF)


@pytest.mark.parametrize("blocks", [(), (2,)], ids=["one block", "two blocks"])
def test_gradients_of_one_image_are_those_among_others(blocks: tuple[int, ...]) -> None:
    out, value = torch.rand(IMAGES, OF_HEADS, *blocks, ROWS_OF, 7), torch.rand(IMAGES, OF_HEADS, *blocks, KEYS_OF, 7)
    rows, columns = slice(1, 4), torch.tensor([3, 0])
    matrix = out @ value.mT
    for gradient in (OuterGradient(out, value), MatrixGradient(matrix)):
        for number in range(IMAGES):
            found = gradient.image(number).part(len(blocks), rows, columns, torch.float64)
            truth = matrix[number : number + 1, :, 1] if blocks else matrix[number : number + 1]
            torch.testing.assert_close(found, truth[:, :, rows][..., columns].double(), atol=1e-6, rtol=0)
