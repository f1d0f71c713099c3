"""Attention operators on sizes that all differ, against matrices that are built in the test."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from visattn.core.operators import (
    MatrixGradient,
    MatrixOperator,
    OuterGradient,
    SampledOperator,
    SoftmaxOperator,
    SumOperator,
)
from visattn.core.operators.images import of_image
from visattn.core.operators.operator import PIECE, ROWS, Operator, exact, token_counts
from visattn.errors import OptionError, ShapeError

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 3, 5, 7, 4
WIDE: dict[str, int] = {"queries": PIECE[0] + 8, "keys": PIECE[1] + 3}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(queries: int = QUERIES, keys: int = KEYS) -> tuple[Tensor, Tensor]:
    return noise(BATCH, HEADS, queries, DIM, seed=1), noise(BATCH, HEADS, keys, DIM, seed=2)


def softmaxed(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return weights and log-sum-exp in float64."""
    scores = torch.einsum("bhqd,bhkd->bhqk", query.double(), key.double()) * scale
    return scores.softmax(-1), scores.logsumexp(-1)


def told(queries: int, keys: int, scale: float = 0.3) -> tuple[SoftmaxOperator, Tensor]:
    """Return an operator that knows its log-sum-exp, and its matrix."""
    query, key = operands(queries, keys)
    weights, lse = softmaxed(query, key, scale)
    return SoftmaxOperator(query, key, scale=scale, lse=lse.float()), weights


def test_pieces_of_a_known_log_sum_exp_cover_the_matrix_and_its_gradient() -> None:
    operator, weights = told(**WIDE)
    gradient = noise(BATCH, HEADS, *WIDE.values(), seed=3)
    found, slopes = torch.zeros_like(weights), torch.zeros_like(weights)
    sizes = []
    for tile in operator.with_gradient(MatrixGradient(gradient)).pieces():
        sizes.append((len(tile.queries), len(tile.keys)))
        assert tile.grad is not None
        found[:, :, tile.queries[:, None], tile.keys] += tile.weights
        slopes[:, :, tile.queries[:, None], tile.keys] += tile.grad
    torch.testing.assert_close(found, weights, atol=1e-5, rtol=0)
    assert torch.equal(slopes.float(), gradient)
    assert sizes == [(PIECE[0], PIECE[1]), (PIECE[0], 3), (8, PIECE[1]), (8, 3)]


def test_pieces_without_a_gradient_hold_none() -> None:
    operator, _ = told(QUERIES, KEYS)
    assert [tile.grad for tile in operator.pieces()] == [None]


def test_products_of_a_known_log_sum_exp_add_up_over_pieces() -> None:
    operator, weights = told(**WIDE)
    r = noise(BATCH, 1, 6, WIDE["queries"], seed=4)
    torch.testing.assert_close(r @ operator, (r.double() @ weights).float(), atol=1e-4, rtol=0)


def test_columns_of_a_known_log_sum_exp_are_scaled() -> None:
    operator, weights = told(QUERIES, KEYS)
    torch.testing.assert_close(operator.columns(torch.tensor([6, 0])).double(), weights[..., [6, 0]], atol=1e-6, rtol=0)


def test_a_known_log_sum_exp_is_used_and_not_computed_again() -> None:
    query, key = operands()
    weights, lse = softmaxed(query, key, 0.5)
    operator = SoftmaxOperator(query, key, lse=lse.float() + math.log(4))
    for found in (
        operator.dense(),
        operator.columns(torch.arange(KEYS)),
        torch.eye(QUERIES)[None, None] @ operator,
        operator.pull(torch.eye(QUERIES)[None, None], "reversed"),
        next(operator.pieces()).weights,
    ):
        torch.testing.assert_close(found.double(), weights / 4, atol=1e-6, rtol=0)


@pytest.mark.parametrize("change", ["bias", "indices"])
def test_a_bias_or_indices_are_kept_with_a_known_log_sum_exp(change: str) -> None:
    query, key = operands()
    bias = noise(1, HEADS, QUERIES, KEYS, seed=5) if change == "bias" else None
    scores = (query.double() @ key.double().mT) / 2 + (0 if bias is None else bias)
    weights, lse = scores.softmax(-1), scores.logsumexp(-1).float()
    rows, columns = torch.tensor([[4, 2, 0, 1, 3]]), torch.tensor([[6, 0, 5, 1, 4, 2, 3]])
    indices = (rows, columns) if change == "indices" else (None, None)
    operator = SoftmaxOperator(query, key, bias, None, *indices, lse=lse)
    if change == "indices":
        weights = weights[:, :, rows[0].argsort()][..., columns[0].argsort()]
    eye = torch.eye(QUERIES)[None, None]
    torch.testing.assert_close(operator.dense().double(), weights, atol=1e-6, rtol=0)
    torch.testing.assert_close(operator.columns(torch.tensor([5, 1])).double(), weights[..., [5, 1]], atol=1e-6, rtol=0)
    torch.testing.assert_close((eye @ operator).double(), weights, atol=1e-6, rtol=0)
    torch.testing.assert_close(operator.pull(eye, "reversed").double(), weights, atol=1e-5, rtol=0)
    found = torch.zeros_like(weights)
    for tile in operator.pieces():
        found[:, :, tile.queries[:, None], tile.keys] = tile.weights.double()
    torch.testing.assert_close(found, weights, atol=1e-6, rtol=0)


def test_scratch_tiles_of_unequal_height_are_right_when_they_are_used_at_once() -> None:
    query, key = operands()
    weights, _ = softmaxed(query, key, 0.5)
    operator, seen, places = SoftmaxOperator(query, key), [], set()
    for tile in operator.tiles(2, scratch=True):
        torch.testing.assert_close(tile.weights.double(), weights[:, :, tile.queries], atol=1e-6, rtol=0)
        seen.append(len(tile.queries))
        places.add(tile.weights.data_ptr())
    assert seen == [2, 2, 1]
    assert len(places) == 1, "the memory was not used again"


def test_the_default_height_of_a_tile() -> None:
    query, key = operands(queries=ROWS + 1)
    assert [len(tile.queries) for tile in SoftmaxOperator(query, key).tiles()] == [ROWS, 1]
    assert ROWS == 128


@pytest.mark.parametrize("rows", [0, -1])
def test_tiles_have_at_least_one_row(rows: int) -> None:
    with pytest.raises(OptionError, match=f"rows must be at least 1, got {rows}"):
        SoftmaxOperator(*operands()).tiles(rows)


def test_a_row_of_equal_negative_scores_is_uniform_however_low_they_are() -> None:
    operator = SoftmaxOperator(torch.full((1, 1, 2, 1), 1e4), torch.full((1, 1, 4, 1), -1e4), scale=1.0)
    assert torch.equal(operator.dense(), torch.full((1, 1, 2, 4), 0.25))


def test_the_scale_is_one_over_the_root_of_the_head_size_by_default() -> None:
    assert SoftmaxOperator(*operands()).scale == 0.5
    assert SoftmaxOperator(*operands(), scale=0).scale == 0


def test_a_reversed_product_refuses_a_scale_of_zero_alone() -> None:
    query, key = operands()
    r = noise(1, 1, 2, QUERIES)
    with pytest.raises(OptionError, match="divides by the scale, which is 0"):
        SoftmaxOperator(query, key, scale=0.0).pull(r, "reversed")
    uniform = SoftmaxOperator(query, key, scale=0.0).pull(r, "tiles")
    expected = (r.sum(-1, keepdim=True) / KEYS).expand(BATCH, HEADS, -1, KEYS)
    torch.testing.assert_close(uniform, expected)


def test_the_same_type_returns_the_operator_itself() -> None:
    operator = SoftmaxOperator(*operands())
    assert operator.to(torch.float32) is operator
    assert operator.to(torch.float64).dtype == torch.float64
    assert operator.dtype == torch.float32


# images of a batch


def test_only_a_tensor_with_the_length_of_the_batch_is_cut() -> None:
    three = torch.arange(6).view(3, 2)
    assert torch.equal(of_image(three, 1, 3), torch.tensor([[2, 3]]))
    assert of_image(three, 1, 2) is three
    number = torch.tensor(5.0)
    assert of_image(number, 0, 1) is number
    assert of_image(None, 0, 1) is None


@pytest.mark.parametrize("number", [-1, 2, 3])
def test_an_image_outside_of_the_batch_is_refused(number: int) -> None:
    with pytest.raises(IndexError, match=f"image {number} of 2"):
        SoftmaxOperator(*operands()).image(number)


@pytest.mark.parametrize("number", [0, 1])
def test_one_image_keeps_its_weights_and_its_gradient(number: int) -> None:
    query, key = operands()
    gradient = noise(BATCH, HEADS, QUERIES, KEYS, seed=6)
    bias = noise(BATCH, 1, QUERIES, KEYS, seed=7)
    for whole in (SoftmaxOperator(query, key, bias), MatrixOperator(SoftmaxOperator(query, key, bias).dense())):
        whole = whole.with_gradient(MatrixGradient(gradient))
        one = whole.image(number)
        assert one.shape == (1, HEADS, QUERIES, KEYS)
        torch.testing.assert_close(one.dense()[0], whole.dense()[number])
        tile = next(iter(one.tiles()))
        assert tile.grad is not None
        assert torch.equal(tile.grad[0], gradient[number])
    total = SumOperator([(2.0, SoftmaxOperator(query, key))]).with_gradient(MatrixGradient(gradient)).image(number)
    assert total.gradient is not None
    assert torch.equal(total.gradient.part(0, slice(None), slice(None), torch.float32)[0], gradient[number])


def test_one_image_judges_its_own_rows() -> None:
    weights = torch.full((2, 1, 2, 4), 0.25)
    weights[1, 0, 1, 3] = 0.5
    whole = MatrixOperator(weights)
    assert not whole.probability
    assert whole.image(0).probability
    assert not whole.image(1).probability


# explicit weights


@pytest.mark.parametrize(
    ("sums", "verdict"), [(1.0, True), (1 + 5e-5, True), (1 - 5e-5, True), (1 + 2e-4, False), (1 - 2e-4, False), (0.0, True)]
)
def test_rows_are_distributions_if_they_sum_to_one_or_to_nothing(sums: float, verdict: bool) -> None:
    weights = torch.full((1, 1, 2, 4), 0.25)
    weights[:, :, 1] *= sums
    assert MatrixOperator(weights).probability is verdict


def test_rows_of_low_precision_may_sum_to_a_little_less_than_one() -> None:
    weights = torch.tensor([[[[0.5, 0.49]]]])
    assert MatrixOperator(weights.bfloat16()).probability
    assert not MatrixOperator(weights).probability


def test_a_negative_weight_is_no_probability() -> None:
    assert not MatrixOperator(torch.tensor([[[[1.5, -0.5]]]])).probability
    assert MatrixOperator(torch.tensor([[[[1.0, 0.0]]]])).probability


def test_sums_and_sampled_points_are_no_distributions() -> None:
    even = MatrixOperator(torch.full((1, 1, 2, 4), 0.25))
    assert SumOperator([(1.0, even)]).probability is False
    assert SampledOperator(torch.zeros(1, 1, 2, 3).long(), torch.full((1, 1, 2, 3), 1 / 3), 4).probability is False
    assert SoftmaxOperator(*operands()).probability is True


def test_three_terms_are_each_weighted_by_their_own_coefficient() -> None:
    parts = [noise(BATCH, HEADS, QUERIES, KEYS, seed=seed) for seed in range(3)]
    whole = SumOperator([(c, MatrixOperator(part)) for c, part in zip((2.0, -0.5, 3.0), parts, strict=True)])
    torch.testing.assert_close(whole.dense(), 2 * parts[0] - 0.5 * parts[1] + 3 * parts[2])


def test_terms_with_and_without_indices_do_not_add() -> None:
    weights, order = noise(1, 1, 3, 4), (torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1, 2, 3]]))
    plain, turned = MatrixOperator(weights), MatrixOperator(weights, *order)
    other = MatrixOperator(weights, order[0], torch.tensor([[0, 1, 3, 2]]))
    for pair in ((plain, turned), (turned, plain), (turned, other)):
        with pytest.raises(ShapeError, match="token order"):
            SumOperator([(1.0, operator) for operator in pair])
    same = SumOperator([(1.0, turned), (1.0, MatrixOperator(weights, *(index.clone() for index in order)))])
    torch.testing.assert_close(same.dense(), 2 * weights)


def test_vectors_of_explicit_weights_are_kept_in_the_order_of_the_tokens() -> None:
    query, key = operands()
    weights = noise(BATCH, HEADS, QUERIES, KEYS)
    plain = MatrixOperator(weights, query=query, key=key)
    assert torch.equal(plain.queries(), query)
    assert torch.equal(plain.keys(), key)
    rows, columns = torch.tensor([[4, 2, -1, 1, 0]]), torch.tensor([[5, 0, 4, 1, 3, 2, -1]])
    turned = MatrixOperator(weights[:, :, None], rows, columns, query=query[:, :, None], key=key[:, :, None])
    assert turned.shape == (BATCH, HEADS, 5, 6)
    for index, vectors, found in ((rows, query, turned.queries()), (columns, key, turned.keys())):
        for place, token in enumerate(index[0].tolist()):
            if token >= 0:
                assert torch.equal(found[:, :, token], vectors[:, :, place])
    assert (turned.queries().shape[2], turned.keys().shape[2]) == (5, 6)
    assert not turned.queries()[:, :, 3].any(), "no vector is known for token 3"


def test_queries_and_keys_that_were_not_recorded_are_asked_for() -> None:
    operator = MatrixOperator(noise(1, 1, 2, 3))
    for ask in (operator.queries, operator.keys):
        with pytest.raises(OptionError, match="were not recorded"):
            ask()


# gradients, indices and padding


def test_gradient_pieces_leave_padding_out_and_keep_the_blocks_apart() -> None:
    rows, columns = torch.tensor([[0, -1, 1], [2, 3, -1]]), torch.tensor([[0, 1, -1, 2], [3, -1, 4, 5]])
    slopes = noise(BATCH, HEADS, 2, 3, 4, seed=8)
    operator = MatrixOperator(noise(BATCH, HEADS, 2, 3, 4), rows, columns).with_gradient(MatrixGradient(slopes))
    found = torch.zeros(BATCH, HEADS, 4, 6)
    for queries, keys, part in operator.gradient_pieces():
        found[:, :, queries[:, None], keys] += part
    expected = torch.zeros(BATCH, HEADS, 4, 6)
    for block in range(2):
        for q, row in enumerate(rows[block].tolist()):
            for k, column in enumerate(columns[block].tolist()):
                if row >= 0 and column >= 0:
                    expected[:, :, row, column] = slopes[:, :, block, q, k]
    assert torch.equal(found, expected)
    tiles = torch.zeros(BATCH, HEADS, 4, 6)
    for tile in operator.tiles(2):
        assert tile.grad is not None
        tiles[:, :, tile.queries[:, None], tile.keys] += tile.grad
    assert torch.equal(tiles, expected)


def test_gradient_pieces_of_one_block_are_split_at_the_size_of_a_piece() -> None:
    out, value = noise(1, 1, WIDE["queries"], 2), noise(1, 1, WIDE["keys"], 2, seed=1)
    operator = SoftmaxOperator(out, value).with_gradient(OuterGradient(out, value))
    found = torch.zeros(1, 1, *WIDE.values())
    count = 0
    for queries, keys, part in operator.gradient_pieces():
        found[:, :, queries[:, None], keys] += part
        count += 1
    assert count == 4
    torch.testing.assert_close(found, out @ value.mT)


def test_gradient_pieces_need_a_gradient() -> None:
    with pytest.raises(OptionError, match="the operator has no gradient"):
        next(SoftmaxOperator(*operands()).gradient_pieces())


def test_token_counts_are_those_of_the_indices() -> None:
    rows, columns = torch.tensor([[0, 1], [2, -1]]), torch.tensor([[0, 4, 1], [2, 3, -1]])
    assert token_counts(rows, columns, (2, 2), (2, 3)) == (3, 5)
    assert token_counts(None, None, (1, 2), (1, 3)) == (2, 3)
    for some, others in ((rows, None), (None, columns)):
        with pytest.raises(ShapeError, match="must be given together"):
            token_counts(some, others, (2, 2), (2, 3))
    with pytest.raises(ShapeError, match=r"= \(2, 4\), got \(2, 3\)"):
        token_counts(rows, columns, (2, 2), (2, 4))


def test_only_attention_to_padded_keys_leaks() -> None:
    weights = torch.tensor([[[[[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]], [[1.0, 2.0, 4.0], [0.0, 1.0, 8.0]]]]])
    rows, columns = torch.tensor([[1, 0], [2, -1]]), torch.tensor([[0, 1, 2], [3, -1, -1]])
    assert torch.equal(MatrixOperator(weights, rows, columns).leaked(), torch.tensor([[[0.0, 0.0, 6.0]]]))
    assert torch.equal(MatrixOperator(weights[:, :, 0]).leaked(), torch.zeros(1, 1, 2))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_exact_turns_off_what_is_on_and_restores_it(autocast: bool, grad: bool) -> None:
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with exact(torch.device("cpu")):
            assert not torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled() is grad
        assert torch.is_autocast_enabled("cpu") is autocast


@pytest.mark.parametrize("shape", [(BATCH, 2, KEYS, 6), (3, 1, KEYS, 6), (BATCH, HEADS, KEYS + 1, 6), (BATCH, HEADS, KEYS)])
def test_a_factor_must_fit_in_batch_heads_and_length(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="x must be"):
        SoftmaxOperator(*operands()) @ torch.zeros(shape)


@pytest.mark.parametrize("shape", [(1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)])
def test_a_factor_may_have_one_image_and_one_head(shape: tuple[int, int]) -> None:
    operator: Operator = SoftmaxOperator(*operands())
    x = noise(*shape, KEYS, 6)
    torch.testing.assert_close(operator @ x, operator.dense() @ x.expand(BATCH, HEADS, -1, -1))


def test_points_of_one_cell_add_up() -> None:
    cells = torch.tensor([[[[0, 2, 2], [1, 1, 1]]]])
    shares = torch.tensor([[[[0.5, 0.25, 0.125], [1.0, 2.0, -0.5]]]])
    operator = SampledOperator(cells, shares, 4)
    assert torch.equal(operator.dense(), torch.tensor([[[[0.5, 0.0, 0.375, 0.0], [0.0, 2.5, 0.0, 0.0]]]]))
    for other in (shares[..., :2], shares[0, 0]):
        with pytest.raises(ShapeError, match="cells and shares must both be"):
            SampledOperator(cells, other, 4)
    with pytest.raises(ShapeError, match="cells and shares must both be"):
        SampledOperator(cells[0, 0], shares[0, 0], 4)


def test_columns_with_a_bias_are_those_of_the_softmax_of_the_biased_scores() -> None:
    query, key = operands()
    bias = noise(BATCH, 1, QUERIES, KEYS, seed=4)
    scores = 0.3 * torch.einsum("bhqd,bhkd->bhqk", query, key) + bias
    operator = SoftmaxOperator(query, key, scale=0.3, bias=bias, lse=scores.logsumexp(-1))
    torch.testing.assert_close(operator.columns(torch.tensor([4, 1])), scores.softmax(-1)[..., [4, 1]])


def test_rows_in_one_buffer_are_right_if_their_number_grows() -> None:
    query, key = operands(queries=40)
    weights, _ = softmaxed(query, key, 0.3)
    rows = SoftmaxOperator(query, key, scale=0.3)._block(0, scratch=True)
    for some in (slice(0, 1), slice(1, 9), slice(9, 40), slice(3, 5)):
        torch.testing.assert_close(rows(some).double(), weights[:, :, some], atol=1e-5, rtol=0)


def test_a_sum_of_one_operator_is_that_operator_times_its_factor() -> None:
    matrix = noise(BATCH, HEADS, QUERIES, KEYS, seed=5)
    sum_ = SumOperator([(-2.0, MatrixOperator(matrix))])
    torch.testing.assert_close(sum_.dense(), -2 * matrix)
