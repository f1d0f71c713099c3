"""Steps of the recursion through layers, on tiles with sizes that all differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from visattn.core.methods.from_attention import recursion
from visattn.core.methods.from_attention.legrad import legrad
from visattn.core.methods.from_attention.norm import head_norms, mixing_ratio, norm_attention, norm_rows
from visattn.core.operators import MatrixGradient, MatrixOperator, Operator, Tile
from visattn.core.provenance import Sink
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.errors import OptionError

BATCH, HEADS, DIM, WIDTH = 2, 3, 4, 5
PLACE = tiny.layout(("cls", "register0"), (3, 4))  # 14 tokens
TOKENS = len(PLACE)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(seed: int = 0) -> MatrixOperator:
    return MatrixOperator(noise(BATCH, HEADS, TOKENS, TOKENS, seed=seed).softmax(-1), dtype=torch.float64)


def tile(weights: Tensor, grad: Tensor | None = None, first: int = 0) -> Tile:
    return Tile(torch.arange(first, first + weights.shape[2]), torch.arange(weights.shape[3]), weights, grad)


WEIGHTS = torch.tensor([[[[1.0, 4.0, 2.0]], [[3.0, 0.0, 7.0]]]], dtype=torch.float64)  # 1 image, 2 heads, 1 query, 3 keys
SLOPES = torch.tensor([[[[2.0, -1.0, 1.0]], [[-1.0, 5.0, 1.0]]]], dtype=torch.float64)


@pytest.mark.parametrize(("fusion", "expected"), [("mean", [2.0, 2.0, 4.5]), ("max", [3.0, 4.0, 7.0]), ("min", [1.0, 0.0, 2.0])])
def test_heads_are_fused_by_mean_maximum_or_minimum(fusion: Any, expected: list[float]) -> None:
    assert recursion.fused(fusion)(tile(WEIGHTS))[0, 0].tolist() == expected


def test_evidence_cuts_each_head_and_net_evidence_their_mean() -> None:
    given = tile(WEIGHTS, SLOPES)  # products 2, -4, 2 and -3, 0, 7
    assert recursion.evidence(given)[0, 0].tolist() == [1.0, 0.0, 4.5]
    assert recursion.net_evidence(given)[0, 0].tolist() == [0.0, 0.0, 4.5]


def test_own_entries_are_found_in_any_order_and_may_be_missing() -> None:
    given = Tile(torch.tensor([6, 2, 9, 0]), torch.tensor([2, 5, 0, 6, 1]), torch.zeros(1, 1, 4, 5))
    here, there = recursion.own_entries(given)
    assert here.tolist() == [0, 1, 3]
    assert there.tolist() == [3, 0, 2]
    lone = Tile(torch.tensor([1]), torch.tensor([8]), torch.zeros(1, 1, 1, 1))
    assert [len(part) for part in recursion.own_entries(lone)] == [0, 0]


def test_a_step_keeps_scales_and_mixes() -> None:
    operator, r = attention(), noise(BATCH, 1, TOKENS, seed=1)
    keep, scale = noise(BATCH, TOKENS, seed=2), noise(BATCH, TOKENS, seed=3)
    sums: dict[int, Tensor] = {}

    def balance(total: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        sums.update(zip(queries.tolist(), total.T, strict=True))
        return keep[:, queries], scale[:, queries]

    found = recursion.step(operator, r, recursion.fused("mean"), balance)
    mean = operator.dense().mean(1)
    expected = r * keep[:, None] + (r * scale[:, None]) @ mean
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.stack([sums[q] for q in range(TOKENS)], 1), mean.sum(-1))


def test_a_step_of_evidence_adds_what_each_head_gives() -> None:
    slopes, r = noise(BATCH, HEADS, TOKENS, TOKENS, seed=4), noise(BATCH, 1, TOKENS, seed=5)
    operator = attention().with_gradient(MatrixGradient(slopes))
    expected = r + r @ (operator.dense() * slopes).clamp(min=0).mean(1)
    before = r.clone()
    torch.testing.assert_close(recursion.step_of_evidence(operator, r), expected)
    assert torch.equal(r, before)


def test_the_mix_of_a_row_with_its_token() -> None:
    sums = torch.tensor([[2.0, 0.0, -1.0, 0.5]])
    stays, scale = recursion.mixed(0.25)(sums, torch.arange(4))
    assert stays.tolist() == [[0.25, 1.0, 1.0, 0.25]]
    assert scale.tolist() == [[0.375, 0.0, 0.0, 1.5]]
    each = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]])
    stays, scale = recursion.mixed(each)(torch.full((2, 2), 2.0), torch.tensor([4, 1]))
    torch.testing.assert_close(stays, torch.tensor([[0.5, 0.2], [0.2, 0.5]]))
    torch.testing.assert_close(scale, torch.tensor([[0.25, 0.4], [0.4, 0.25]]))


def test_rows_and_the_identity_are_normalized_together() -> None:
    keep, scale = recursion.added_and_normalized(torch.tensor([[0.0, 1.0, 3.0]]), torch.arange(3))
    assert keep.tolist() == scale.tolist() == [[1.0, 0.5, 0.25]]


def test_the_own_entry_of_each_row_is_taken_out() -> None:
    given = Tile(torch.tensor([2, 0]), torch.tensor([0, 1, 2]), torch.ones(1, 2, 2, 3))
    found = recursion.others(recursion.fused("mean"))(given)
    assert found.tolist() == [[[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]]


# discarding


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.08, 0), (0.09, 1), (0.5, 6), (0.99, 11)])
def test_the_smallest_patches_of_each_row_are_discarded(ratio: float, count: int) -> None:
    operator = attention()
    rows = recursion.discarding(recursion.fused("mean"), operator, PLACE, ratio, "row")
    mean = operator.dense().mean(1)
    for part in operator.tiles(5):
        found = rows(part)
        for image in range(BATCH):
            for row, query in enumerate(part.queries.tolist()):
                patches = mean[image, query, 2:].tolist()
                limit = sorted(patches)[count]
                expected = [*mean[image, query, :2].tolist(), *(value if value >= limit else 0.0 for value in patches)]
                assert found[image, row].tolist() == expected


def test_weights_equal_to_the_smallest_that_is_kept_are_kept() -> None:
    place = tiny.layout(("cls",), (1, 4))
    weights = torch.tensor([[[[0.0, 3.0, 1.0, 1.0, 2.0]] * 5]])
    operator = MatrixOperator(weights)
    for over, ratio in (("row", 0.25), ("layer", 0.25), ("row", 0.5), ("layer", 0.49)):
        rows = recursion.discarding(recursion.fused("mean"), operator, place, ratio, over)
        expected = [0.0, 3.0, 1.0, 1.0, 2.0] if ratio != 0.5 else [0.0, 3.0, 0.0, 0.0, 2.0]
        for part in operator.tiles():
            assert rows(part)[0].tolist() == [expected] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.9, 0.999])
def test_the_limit_of_a_layer_is_a_weight_of_each_image_by_its_rank(ratio: float, dtype: torch.dtype) -> None:
    operator = attention().to(dtype)
    limit = recursion._whole_limit(recursion.fused("max"), operator, 2, ratio)
    patches = operator.dense().amax(1)[..., 2:].flatten(1).sort(-1).values
    assert limit.shape == (BATCH,)
    assert limit.dtype == dtype
    assert torch.equal(limit, patches[:, int(ratio * patches.shape[1])])


def test_limits_tell_weights_apart_that_differ_in_their_last_bits() -> None:
    place = tiny.layout((), (1, 4))
    base = torch.tensor(0.3, dtype=torch.float64)
    steps = [base]
    for _ in range(3):
        steps.append(torch.nextafter(steps[-1], torch.tensor(1.0, dtype=torch.float64)))
    operator = MatrixOperator(torch.stack(steps).expand(1, 1, 4, 4).contiguous(), dtype=torch.float64)
    limit = recursion._whole_limit(recursion.fused("mean"), operator, 0, 0.5)
    assert limit.item() == steps[2].item()
    rows = recursion.discarding(recursion.fused("mean"), operator, place, 0.5, "layer")
    assert (rows(next(iter(operator.tiles()))) > 0).tolist() == [[[False, False, True, True]] * 4]


# sinks


def test_attention_to_sinks_is_dropped_or_spread_over_the_other_patches() -> None:
    operator = attention(seed=6)
    found = [(Sink(0, 1, 30.0, "a"), Sink(2, 3, 25.0, "a")), (Sink(1, 0, 40.0, "a"),)]
    sunk = [[3, 13], [6]]
    mean = operator.dense().mean(1)
    for treatment in ("drop", "redistribute"):
        rows = recursion.without_sinks(recursion.fused("mean"), found, PLACE, treatment, operator)
        expected = mean.clone()
        for image, tokens in enumerate(sunk):
            others = [token for token in range(2, TOKENS) if token not in tokens]
            for query in range(TOKENS):
                lost = sum(mean[image, query, token] for token in tokens)
                expected[image, query, tokens] = 0
                if treatment == "redistribute":
                    expected[image, query, others] += lost / len(others)
        for part in operator.tiles(5):
            torch.testing.assert_close(rows(part), expected[:, part.queries])


# beginnings


def recorded(kind: str = "self") -> Recording:
    made = Recording(readout="cls", input_size=(48, 64))
    made.records.append(tiny.record(attention(), PLACE, layer="first"))
    made.records.append(tiny.record(attention(seed=1), PLACE, layer="second"))
    if kind == "pool":
        keys = tiny.layout(("register0",), (3, 4))
        asking = TokenLayout("pool", ("query0",), (), PLACE.box)
        weights = noise(BATCH, HEADS, 1, len(keys), seed=9).softmax(-1)
        made.records.append(
            AttentionRecord("head", 0, 0, "pool", MatrixOperator(weights, dtype=torch.float64), queries=asking, keys=keys)
        )
        made.readout = "pool"
    return made


def test_the_recursion_begins_at_the_query_once_for_each_image() -> None:
    made = recorded()
    row, chosen = recursion.beginning(made, made.records, "patch:1,2+register:0", recursion.fused("mean"), torch.float64)
    expected = [0.0] * TOKENS
    expected[1] = expected[2 + 6] = 0.5
    assert row.tolist() == [[expected]] * BATCH
    assert chosen == "patch:1,2+register:0"


def test_the_recursion_begins_at_the_head_that_pools_tokens_by_their_names() -> None:
    made = recorded("pool")
    row, chosen = recursion.beginning(made, made.records[:2], "auto", recursion.fused("mean"), torch.float64)
    mean = made.records[2].operator.dense().mean(1)
    expected = torch.zeros(BATCH, 1, TOKENS, dtype=torch.float64)
    expected[:, :, 1] = mean[..., 0]
    expected[:, :, 2:] = mean[..., 1:]
    torch.testing.assert_close(row, expected)
    assert chosen == "pool (head)"
    other, _ = recursion.beginning(made, made.records[:2], "cls", recursion.fused("mean"), torch.float64)
    assert other.tolist() == [[[1.0] + [0.0] * (TOKENS - 1)]] * BATCH


@pytest.mark.parametrize("start", [-1, 2, 3])
def test_a_first_layer_outside_is_refused(start: int) -> None:
    with pytest.raises(OptionError, match=rf"must lie in \[0, 1\], got {start}"):
        recursion.check_start(start, 2)


@pytest.mark.parametrize("start", [0, 1])
def test_every_layer_may_be_the_first(start: int) -> None:
    recursion.check_start(start, 2)


# norms


def valued(operator: Operator) -> AttentionRecord:
    return tiny.record(
        operator,
        PLACE,
        value=noise(BATCH, HEADS, TOKENS, DIM, seed=10),
        output_weight=noise(WIDTH, HEADS * DIM, seed=11),
        residual=noise(BATCH, TOKENS, WIDTH, seed=12),
    )


def given(record: AttentionRecord) -> Tensor:
    """Return the vector that each head takes from each key to each query, `(B, heads, Q, K, D)`, by loops."""
    assert record.value is not None
    assert record.output_weight is not None
    weights = record.operator.dense()
    out = torch.zeros(BATCH, HEADS, TOKENS, TOKENS, WIDTH, dtype=torch.float64)
    for h in range(HEADS):
        projected = record.value[:, h] @ record.output_weight[:, h * DIM : (h + 1) * DIM].T
        out[:, h] = weights[:, h, :, :, None] * projected[:, None]
    return out


def test_norms_of_heads_and_of_their_sum_equal_vectors_that_are_built() -> None:
    record = valued(attention(seed=13))
    vectors = given(record)
    assert record.residual is not None
    own = vectors.sum(1)
    index = torch.arange(TOKENS)
    with_residual = own.clone()
    with_residual[:, index, index] += record.residual
    by_head, summed = head_norms(record, torch.float64), norm_rows(record, torch.float64)
    kept = norm_rows(record, torch.float64, residual=True)
    for part in record.operator.tiles(5):
        torch.testing.assert_close(by_head(part), vectors[:, :, part.queries].norm(dim=-1))
        torch.testing.assert_close(summed(part), own[:, part.queries].norm(dim=-1))
        torch.testing.assert_close(kept(part), with_residual[:, part.queries].norm(dim=-1))


def test_the_mixing_ratio_compares_what_others_give_with_what_is_kept() -> None:
    record = valued(attention(seed=14))
    vectors = given(record).sum(1)
    assert record.residual is not None
    own = vectors.diagonal(dim1=1, dim2=2).mT
    others, kept = (vectors.sum(2) - own).norm(dim=-1), (own + record.residual).norm(dim=-1)
    torch.testing.assert_close(mixing_ratio(record, torch.float64), others / (others + kept))


@pytest.mark.parametrize("keep_heads", [False, True])
def test_a_map_of_norms_averages_the_norms_of_its_queries(keep_heads: bool) -> None:
    made = recorded()
    made.records[1] = valued(attention(seed=15))
    found = norm_attention(made, keep_heads=keep_heads, query="patch:0,1+patch:2,3", dtype=torch.float64)
    vectors = given(made.records[1])
    norms = (vectors if keep_heads else vectors.sum(1)).norm(dim=-1)
    expected = (norms[..., 3, 2:] + norms[..., 13, 2:]) / 2
    torch.testing.assert_close(found.values, expected.reshape(BATCH, *[HEADS] * keep_heads, 3, 4))
    assert found.labels == ({"head": ("0", "1", "2")} if keep_heads else {})
    with pytest.raises(OptionError, match="belongs to no head"):
        norm_attention(made, keep_heads=True, add_residual=True)


def test_legrad_takes_rows_of_any_sum_and_averages_layers_heads_and_queries() -> None:
    made = recorded()
    slopes = [noise(BATCH, HEADS, TOKENS, TOKENS, seed=seed) for seed in (16, 17)]
    for number, slope in enumerate(slopes):
        operator = MatrixOperator(noise(BATCH, HEADS, TOKENS, TOKENS, seed=18), dtype=torch.float64)
        made.records[number] = tiny.record(operator.with_gradient(MatrixGradient(slope)), PLACE, layer=f"layer{number}")
    each = [slope.clamp(min=0).sum((1, 2)) / (HEADS * TOKENS) for slope in slopes]
    for count, expected in ((None, (each[0] + each[1]) / 2), (2, (each[0] + each[1]) / 2), (1, each[1])):
        found = legrad(made, last_layers=count, dtype=torch.float64)
        torch.testing.assert_close(found.values, expected[:, 2:].reshape(BATCH, 3, 4))
        assert found.provenance.parameters["last_layers"] == (count or 2)
    for wrong in (0, 3):
        with pytest.raises(OptionError, match=rf"last_layers must lie in \[1, 2\], got {wrong}"):
            legrad(made, last_layers=wrong)
