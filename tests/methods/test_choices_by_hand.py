"""Choice of records, attention and query tokens, with values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests import tiny
from visattn.core.methods.from_attention.attention import attention
from visattn.core.methods.from_attention.gradients import attention_gradient
from visattn.core.methods.from_attention.relevance_of_sets import _normalized
from visattn.core.methods.from_attention.transition import _gradient_rows
from visattn.core.methods.queries import members_asked, token_of, weights_of
from visattn.core.methods.selection import advice, chain, chain_refusal, spatial_refusal
from visattn.core.methods.sinks import attention_received, find_sinks, sink_mass, sinks_of_scores
from visattn.core.operators import MatrixGradient, MatrixOperator
from visattn.core.provenance import Sink
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.errors import OptionError, ShapeError

BATCH, HEADS = 2, 3
PLACE = tiny.layout(("cls",), (5, 7))
TOKENS = len(PLACE)
CPU = torch.device("cpu")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attended(*weights: Tensor, place: TokenLayout = PLACE) -> Recording:
    made = Recording(readout="cls", input_size=(80, 112))
    made.records += [tiny.record(MatrixOperator(each), place, layer=f"layer{i}") for i, each in enumerate(weights)]
    return made


def random(seed: int) -> Tensor:
    return noise(BATCH, HEADS, TOKENS, TOKENS, seed=seed).softmax(-1)


# sinks


def test_sinks_lie_above_the_threshold_and_are_named_highest_first() -> None:
    records = attended(random(0), random(1)).records
    scores = torch.zeros(BATCH, 2, TOKENS)
    scores[0, 0, 0] = 90.0  # the class token
    scores[0, 0, 1 + 1 * 7 + 3], scores[0, 1, 1 + 1 * 7 + 3] = 20.0, 20.125
    scores[0, 0, 1 + 4 * 7 + 6] = 33.126
    scores[1, 1, 1] = 20.0
    found = sinks_of_scores(scores, records)
    assert found == ((Sink(4, 6, 33.13, "layer0"), Sink(1, 3, 20.12, "layer1")), ())
    assert sinks_of_scores(scores, records, 19.9)[1] == (Sink(0, 0, 20.0, "layer1"),)


def test_attention_received_is_the_column_mean_times_the_keys() -> None:
    made = attended(random(2), random(3))
    expected = torch.stack([record.operator.dense().mean((1, 2)) * TOKENS for record in made.records], 1)
    torch.testing.assert_close(attention_received(made), expected)


def planted() -> Recording:
    """Record 36 queries, all of which give three quarters of their attention to patch 4,2 of the first image and 0,1 of the second."""
    weights = torch.full((BATCH, HEADS, TOKENS, TOKENS), 0.25 / (TOKENS - 1))
    weights[0, ..., 1 + 4 * 7 + 2] = weights[1, ..., 1 + 1] = 0.75
    return attended(weights, torch.full_like(weights, 1 / TOKENS))


@pytest.mark.parametrize(("threshold", "count"), [(26.9, 1), (27.0, 0), (107.0, 0)])
def test_sinks_among_more_queries_than_are_sampled_have_exact_scores(threshold: float, count: int) -> None:
    found = find_sinks(planted(), threshold)
    assert [len(one) for one in found] == [count, count]
    if count:
        assert found == ((Sink(4, 2, 27.0, "layer0"),), (Sink(0, 1, 27.0, "layer0"),))


def test_the_mass_of_sinks_leaves_out_what_they_give_to_themselves() -> None:
    made = attended(random(4), random(5))
    found = [(Sink(1, 2, 30.0, "layer0"), Sink(3, 4, 25.0, "layer0")), ()]
    tokens = [1 + 9, 1 + 25]
    mean = torch.stack([record.operator.dense().mean(1) for record in made.records], 1)  # (B, layers, Q, K)
    expected = torch.zeros(BATCH, 2)
    for layer in range(2):
        for token in tokens:
            column = mean[0, layer, :, token]
            expected[0, layer] += (column.sum() - column[token]) / TOKENS
    torch.testing.assert_close(sink_mass(made, found), expected)
    scores = torch.zeros(BATCH, 2, TOKENS)
    assert sink_mass(made, found, scores)[0, 0] < 0, "given scores are used"


# attention


def test_attention_to_sinks_is_dropped_or_spread() -> None:
    made = planted()
    rows = made[0].operator.dense()[:, :, 1 + 8]
    for treatment in ("drop", "redistribute"):
        found = attention(made, layer=0, query="patch:1,1", sinks=treatment).values
        expected = rows.clone()
        for image, sink in enumerate((31, 2)):
            lost = rows[image, :, sink]
            expected[image, :, sink] = 0
            others = [token for token in range(1, TOKENS) if token != sink]
            if treatment == "redistribute":
                expected[image][:, others] += lost[:, None] / len(others)
        if treatment == "drop":
            expected /= expected.sum(-1, keepdim=True)
        torch.testing.assert_close(found, expected[..., 1:].reshape(BATCH, HEADS, 5, 7))


@pytest.mark.parametrize(("head", "label"), [(0, "0"), (2, "2"), (-3, "0"), (-1, "2")])
def test_a_head_is_counted_from_either_end(head: int, label: str) -> None:
    made = attended(random(6))
    found = attention(made, head=head, query="patch:0,0").values
    torch.testing.assert_close(found, made[0].operator.dense()[:, int(label), 1, 1:].reshape(BATCH, 5, 7))
    for wrong in (3, -4):
        with pytest.raises(OptionError, match=rf"head must lie in \[-3, 2\], got {wrong}"):
            attention(made, head=wrong)


def test_padding_and_sampling_are_told_only_where_they_are() -> None:
    made = attended(random(7))
    assert [note for note in attention(made).provenance.notes if "padding" in note or "points" in note] == []
    index = torch.cat([torch.arange(TOKENS), torch.tensor([-1])])[None]
    weights = torch.full((BATCH, HEADS, 1, TOKENS + 1, TOKENS + 1), 0.75 / TOKENS)
    weights[..., -1] = 0.25
    padded = replace(made, records=[tiny.record(MatrixOperator(weights, index, index), PLACE)])
    assert "25% of the attention goes to padding and is not drawn" in attention(padded).provenance.notes


def test_attention_times_gradient_averages_layers_and_heads() -> None:
    made = attended(random(8), random(9))
    slopes = [noise(BATCH, HEADS, TOKENS, TOKENS, seed=seed) for seed in (10, 11)]
    made.records[:] = [
        replace(record, operator=record.operator.with_gradient(MatrixGradient(slope)))
        for record, slope in zip(made.records, slopes, strict=True)
    ]
    products = [record.operator.dense() * slope for record, slope in zip(made.records, slopes, strict=True)]
    row = 1 + 2 * 7 + 5
    for signed in (False, True):
        each = [product if signed else product.clamp(min=0) for product in products]
        whole = (each[0].mean(1) + each[1].mean(1)) / 2
        found = attention_gradient(made, signed=signed, query="patch:2,5")
        torch.testing.assert_close(found.values, whole[:, row, 1:].reshape(BATCH, 5, 7))
        assert found.signed is signed
        one = attention_gradient(made, signed=signed, query="patch:2,5", layer=0, head=-1)
        torch.testing.assert_close(one.values, each[0][:, 2, row, 1:].reshape(BATCH, 5, 7))
    for wrong in (3, -4):
        with pytest.raises(OptionError, match=rf"head must lie in \[-3, 2\], got {wrong}"):
            attention_gradient(made, head=wrong)


def test_rows_of_the_gradient_are_those_of_the_asked_queries() -> None:
    slope = noise(BATCH, HEADS, TOKENS, TOKENS, seed=12)
    record = tiny.record(MatrixOperator(random(13)).with_gradient(MatrixGradient(slope)), PLACE)
    asked = torch.tensor([3, 0, 35])
    assert torch.equal(_gradient_rows(record, asked, torch.float32), slope[:, :, asked])


def test_relevance_is_normalized_without_the_identity() -> None:
    given = torch.tensor([[[1.0, 0.0, 0.0], [1.0, 1.0, 3.0], [0.0, 2.0, 3.0]]])
    expected = torch.tensor([[[1.0, 0.0, 0.0], [0.25, 1.0, 0.75], [0.0, 0.5, 1.5]]])
    torch.testing.assert_close(_normalized(given), expected)


# recordings


def test_layers_compose_if_their_rows_are_distributions_or_need_not_be() -> None:
    made = attended(random(14), 2 * random(15))
    with pytest.raises(OptionError, match="attention rows do not sum to 1 in this model"):
        chain(made)
    assert [record.layer for record in chain(made, probability=False)] == ["layer0", "layer1"]
    assert chain_refusal(attended(random(14), random(15))) is None
    two = [*attended(random(14)).records, replace(made[0], forward=1)]
    with pytest.raises(OptionError, match="holds 2 forward passes"):
        chain(replace(made, records=two))


def test_layers_over_different_tokens_are_named_with_their_sizes() -> None:
    small, free = tiny.layout((), (3, 4)), TokenLayout("words", ("word0", "word1"), (), PLACE.box)
    square = torch.full((1, 1, 12, 12), 1 / 12)
    made = attended(random(16))
    made.records.append(tiny.record(MatrixOperator(square), small, layer=""))
    said = chain_refusal(made)
    assert said is not None
    assert said.startswith("layer0 (5 x 7) and the model itself (3 x 4) attend over different tokens")
    assert said.endswith(" Use method 'attention'.")
    holes = TokenLayout("tokens", (), (3, 5), PLACE.box, (1, 4, 14))
    made.records[1] = tiny.record(MatrixOperator(square), holes, layer="late")
    assert "late (3 x 5 without 3)" in str(chain_refusal(made))
    words = AttentionRecord("text", 0, 0, "self", MatrixOperator(torch.full((1, 1, 2, 2), 0.5)), queries=free, keys=free)
    crossed = AttentionRecord("meet", 0, 0, "cross", MatrixOperator(torch.ones(1, 1, 2, TOKENS)), queries=free, keys=PLACE)
    assert "its keys are other tokens (5 x 7) than its queries (2 tokens)" in str(
        chain_refusal(replace(made, records=[made[0], words, crossed]))
    )


def test_attention_that_cannot_be_drawn_is_explained() -> None:
    assert str(spatial_refusal(Recording())).startswith("no layer multiplied a softmax by values")
    place = TokenLayout("unknown", ("a", "b"), (), PLACE.box)
    record = tiny.record(MatrixOperator(torch.full((1, 1, 2, 2), 0.5)), place, layer="one")
    assert spatial_refusal(Recording(records=[record])) == "no attention over tokens on a grid was recorded."
    assert spatial_refusal(Recording(records=[record, replace(record, reason="it is odd")])) == "one: it is odd."
    assert "channels attend to channels" in str(spatial_refusal(Recording(records=[replace(record, kind="channel")])))
    assert advice(Recording(records=[record])) == ""
    assert spatial_refusal(attended(random(17))) is None


# queries


def test_weights_of_joined_queries_are_shared_evenly() -> None:
    place = tiny.layout(("cls", "register0", "distillation"), (5, 7))
    reading = tiny.recording().reading
    for query, expected in (
        ("cls", {0: 1.0}),
        ("register:0", {1: 1.0}),
        ("distillation", {2: 1.0}),
        ("patch:4,6", {37: 1.0}),
        ("cls+patch:0,1", {0: 0.5, 4: 0.5}),
        ("mean", {token: 1 / 35 for token in range(3, 38)}),
        ("all", {token: 1 / 38 for token in range(38)}),
        ("cls+mean", {0: 0.5} | {token: 0.5 / 35 for token in range(3, 38)}),
    ):
        weights, chosen = weights_of(query, place, reading, CPU)
        wanted = torch.tensor([expected.get(token, 0.0) for token in range(38)], dtype=torch.float64)
        torch.testing.assert_close(weights, wanted.view(1, 1, 1, 38))
        assert chosen == query
    for shape in ((37,), (1, 2, 38), (38, 1)):
        with pytest.raises(ShapeError, match="with Q = 38 tokens"):
            weights_of(torch.ones(shape), place, reading, CPU)
    assert weights_of(torch.ones(2, 38), place, reading, CPU)[0].shape == (2, 1, 1, 38)
    assert weights_of(torch.ones(38), place, reading, CPU)[0].shape == (1, 1, 1, 38)


def test_tokens_are_found_by_their_names_alone() -> None:
    place = TokenLayout("q", ("query0", "query1", "word0"), (), PLACE.box)
    for query, token in (("query:1", 1), ("object:1", 1), ("latent:0", 0), ("word:0", 2), ("query:0", 0)):
        assert token_of(query, place) == token
    for query in ("object:2", "query1:", "register:0", "cls", "patch:1", "pixel:1,1"):
        with pytest.raises(OptionError):
            token_of(query, place)
    assert members_asked("query:1+word:0", place) is True
    assert members_asked("query:1+word:3", place) is False
    assert members_asked("cls", place) is None
    assert members_asked(torch.ones(3), place) is None
