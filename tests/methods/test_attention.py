from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.oracles import maps as oracles
from visattn.core import methods
from visattn.core.geometry import Box
from visattn.core.operators import SoftmaxOperator
from visattn.core.records import Recording, TokenLayout
from visattn.errors import OptionError, ShapeError

PREFIX = ("cls", "distillation", "register0", "register1")
GRID = (5, 7)
FIRST = len(PREFIX)
CLOSE: Any = {"atol": 1e-6, "rtol": 1e-5}


@pytest.fixture(scope="module")
def recorded() -> Recording:
    """Record three layers with three heads for two images of 5 x 7 patches after four prefix tokens."""
    return tiny.recording(batch=2, heads=3, layers=3, prefix=PREFIX, grid=GRID)


@pytest.fixture(scope="module")
def exact(recorded: Recording) -> list[oracles.Array]:
    """Compute each layer's matrices by nested loops."""
    return [tiny.matrices(record).numpy() for record in recorded]


def weighted_rows(dense: oracles.Array, weights: dict[int, float]) -> oracles.Array:
    """Compute the weighted sum of rows, entry by entry, without the prefix: `(B, heads, rows, columns)`."""
    batch, heads = dense.shape[:2]
    out = np.zeros((batch, heads, *GRID))
    for b, h, row, column in np.ndindex(*out.shape):
        token = FIRST + row * GRID[1] + column
        out[b, h, row, column] = sum(weight * dense[b, h, query, token] for query, weight in weights.items())
    return out


UNEVEN = {0: 0.5, 3: 0.25, FIRST + 8: -1.0}
QUERIES: dict[str, tuple[str | Tensor, dict[int, float]]] = {
    "auto": ("auto", {0: 1.0}),
    "cls": ("cls", {0: 1.0}),
    "distillation": ("distillation", {1: 1.0}),
    "cls and distillation": ("cls+distillation", {0: 0.5, 1: 0.5}),
    "register": ("register:1", {3: 1.0}),
    "mean of the patches": ("mean", {FIRST + i: 1 / 35 for i in range(35)}),
    "first patch": ("patch:0,0", {FIRST: 1.0}),
    "last patch": ("patch:4,6", {FIRST + 34: 1.0}),
    "patch with a space": ("patch:1, 2", {FIRST + 9: 1.0}),
    "weights": (torch.zeros(39).index_put((torch.tensor(list(UNEVEN)),), torch.tensor(list(UNEVEN.values()))), UNEVEN),
}


@pytest.mark.parametrize("name", list(QUERIES))
def test_map_is_the_row_of_the_query(name: str, recorded: Recording, exact: list[oracles.Array]) -> None:
    query, weights = QUERIES[name]
    result = methods.attention(recorded, query=query)
    assert result.axes == ("batch", "head")
    np.testing.assert_allclose(result.values, weighted_rows(exact[-1], weights), **CLOSE)


def test_query_weights_are_applied_to_each_image_separately(recorded: Recording, exact: list[oracles.Array]) -> None:
    query = torch.zeros(2, 39)
    query[0, 5] = query[1, 0] = 1
    result = methods.attention(recorded, query=query)
    np.testing.assert_allclose(result.values[0], weighted_rows(exact[-1], {5: 1.0})[0], **CLOSE)
    np.testing.assert_allclose(result.values[1], weighted_rows(exact[-1], {0: 1.0})[1], **CLOSE)


def test_many_weighted_queries_agree_with_few(recorded: Recording, exact: list[oracles.Array]) -> None:
    weights = torch.rand(39, generator=torch.Generator().manual_seed(0))
    result = methods.attention(recorded, query=weights)
    np.testing.assert_allclose(result.values, weighted_rows(exact[-1], dict(enumerate(weights.tolist()))), **CLOSE)


@pytest.mark.parametrize(
    ("prefix", "readout", "weights"),
    [
        (("cls",), "cls", {0: 1.0}),
        (("cls", "distillation"), "cls+distillation", {0: 0.5, 1: 0.5}),
        (("cls",), "mean", {i: 1 / 6 for i in range(1, 7)}),
        ((), "mean", {i: 1 / 6 for i in range(6)}),
        ((), "cls", {i: 1 / 6 for i in range(6)}),
    ],
    ids=["cls", "cls and distillation", "mean beside cls", "mean", "cls that does not exist"],
)
def test_automatic_query_is_the_models_readout(prefix: tuple[str, ...], readout: str, weights: dict[int, float]) -> None:
    made = tiny.recording(prefix=prefix, readout=readout)
    dense = tiny.matrices(made[-1])[0]
    expected = sum(weight * dense[:, query, len(prefix) :] for query, weight in weights.items())
    np.testing.assert_allclose(methods.attention(made).values[0].flatten(1), expected, **CLOSE)


@pytest.mark.parametrize(("layer", "number"), [(0, 0), (1, 1), (-1, 2), (-3, 0), ("blocks.1.attn", 1)], ids=str)
def test_layer_is_chosen_by_position_or_name(
    layer: int | str, number: int, recorded: Recording, exact: list[oracles.Array]
) -> None:
    result = methods.attention(recorded, layer=layer)
    np.testing.assert_allclose(result.values, weighted_rows(exact[number], {0: 1.0}), **CLOSE)
    assert result.provenance.parameters["layer"] == f"blocks.{number}.attn"


def test_all_layers_are_stacked_first_to_last(recorded: Recording, exact: list[oracles.Array]) -> None:
    result = methods.attention(recorded, layer="all")
    assert result.axes == ("batch", "layer", "head")
    assert result.labels == {"layer": ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn"), "head": ("0", "1", "2")}
    expected = np.stack([weighted_rows(dense, {0: 1.0}) for dense in exact], axis=1)
    np.testing.assert_allclose(result.values, expected, **CLOSE)


@pytest.mark.parametrize(("head", "number"), [(0, 0), (2, 2), (-1, 2)])
@pytest.mark.parametrize("layer", [-1, "all"])
def test_one_head_is_chosen(head: int, number: int, layer: int | str, recorded: Recording) -> None:
    result = methods.attention(recorded, head=head, layer=layer)
    whole = methods.attention(recorded, layer=layer)
    assert result.axes == tuple(name for name in whole.axes if name != "head")
    assert "head" not in result.labels
    assert torch.equal(result.values, whole.values.select(whole.axes.index("head"), number))


FUSED: dict[str, Callable[..., oracles.Array]] = {"mean": np.mean, "max": np.max, "min": np.min}


@pytest.mark.parametrize("layer", [-1, "all"])
@pytest.mark.parametrize("fusion", list(FUSED))
def test_heads_are_fused(fusion: Any, layer: Any, recorded: Recording, exact: list[oracles.Array]) -> None:
    result = methods.attention(recorded, fusion=fusion, layer=layer)
    rows = np.stack([weighted_rows(dense, {0: 1.0}) for dense in exact], axis=1)
    expected = FUSED[fusion](rows, axis=2)
    np.testing.assert_allclose(result.values, expected if layer == "all" else expected[:, -1], **CLOSE)
    assert result.axes == (("batch", "layer") if layer == "all" else ("batch",))


def test_float64_gives_the_exact_row_rounded_once(recorded: Recording, exact: list[oracles.Array]) -> None:
    result = methods.attention(recorded, dtype=torch.float64)
    np.testing.assert_allclose(result.values, weighted_rows(exact[-1], {0: 1.0}), atol=0, rtol=1e-7)


def test_note_states_what_went_to_the_prefix(recorded: Recording, exact: list[oracles.Array]) -> None:
    share = exact[-1][:, :, 0, :FIRST].sum(-1).mean()
    note = f"{share:.0%} of the attention goes to the prefix tokens (cls, distillation, register0, register1) and is not drawn"
    assert note in methods.attention(recorded).provenance.notes


def test_map_of_a_model_without_prefix_sums_to_one() -> None:
    result = methods.attention(tiny.recording(prefix=(), readout="mean", grid=GRID))
    np.testing.assert_allclose(result.values.sum((-2, -1)), 1, atol=1e-5)
    assert result.provenance.notes == ()


def pooling() -> Recording:
    """Record two layers of self-attention and a pooling head whose two queries attend to patches of their own token set."""
    made = tiny.recording(readout="pool")
    patches = replace(made[0].keys, space="patches", prefix=())
    queries = TokenLayout("pool", ("query0", "query1"), (), Box(0, 0, 32, 48))
    operator = SoftmaxOperator(tiny.operands(2, seed=8)[0], tiny.operands(6, seed=9)[1])
    head = replace(made[0], layer="attn_pool", kind="pool", operator=operator, queries=queries, keys=patches, value=None)
    made.records.append(head)
    return made


def test_automatic_query_of_a_pooling_model_is_its_pooling_head() -> None:
    made = pooling()
    result = methods.attention(made)
    expected = tiny.matrices(made[-1]).mean(2).reshape(1, 2, 2, 3)
    np.testing.assert_allclose(result.values, expected, **CLOSE)
    assert result.provenance.parameters["layer"] == "attn_pool"


@pytest.mark.parametrize(("choice", "layer"), [({"layer": "all"}, 2), ({"query": "patch:0,1"}, 1)], ids=["all layers", "a patch"])
def test_choosing_a_layer_or_patch_of_a_pooling_model_selects_its_self_attention(choice: dict[str, Any], layer: int) -> None:
    result = methods.attention(pooling(), **choice)
    assert result.layout.prefix == ("cls",)
    assert result.provenance.parameters["layer"] == ("all" if layer == 2 else "blocks.1.attn")


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ({"head": 3}, OptionError, r"head must lie in \[-3, 2\], got 3"),
        ({"layer": 3}, OptionError, r"layer must lie in \[-3, 2\], got 3"),
        ({"layer": "norm"}, OptionError, "layer must be one of blocks.0.attn, .*, got 'norm'"),
        ({"fusion": "median"}, OptionError, "unknown fusion 'median'"),
        ({"query": "patch:5,0"}, OptionError, "patch 5,0 lies outside the grid of 5 x 7"),
        ({"query": "patch:1"}, OptionError, "unknown query 'patch:1'; known: auto, read, cls"),
        ({"query": "register:7"}, OptionError, "no token 'register:7'; its prefix tokens: cls, distillation"),
        ({"query": "clss"}, OptionError, "unknown query 'clss'"),
        ({"query": "pixel:3,4"}, OptionError, "a pixel query needs the photo's geometry"),
        ({"query": torch.ones(5)}, ShapeError, r"query weights must be .* Q = 39 tokens, got \(5,\)"),
        ({"query": torch.ones(1, 1, 39)}, ShapeError, "query weights must be"),
        ({"dtype": torch.float16}, OptionError, "dtype must be"),
    ],
    ids=lambda value: None,
)
def test_attention_refuses(choice: dict[str, Any], error: type[Exception], message: str, recorded: Recording) -> None:
    with pytest.raises(error, match=message):
        methods.attention(recorded, **choice)


def test_query_cls_without_a_class_token_is_refused() -> None:
    with pytest.raises(OptionError, match=r"no token 'cls'; its prefix tokens: none. Use mean or patch:ROW,COL"):
        methods.attention(tiny.recording(prefix=(), readout="mean"), query="cls")


def test_several_forwards_are_refused(recorded: Recording) -> None:
    twice = replace(recorded, records=[*recorded.records, *(replace(record, forward=1) for record in recorded)])
    with pytest.raises(OptionError, match=r"holds 2 forward passes. Choose one: recording.select\(forward=0\)"):
        methods.attention(twice)


@pytest.mark.parametrize("layer", [-1, 0, "all"])
def test_recording_without_attention_is_refused(layer: Any) -> None:
    with pytest.raises(OptionError):
        methods.attention(Recording(), layer=layer)


def test_the_share_on_prefix_tokens_is_that_of_the_weights() -> None:
    made = tiny.recording(prefix=("cls", "register0"), readout="cls")
    row = tiny.matrices(made[-1])[0][:, 0]  # (heads, keys)
    share = float(row[:, :2].sum() / row.sum())
    assert f"{share:.0%} of the attention goes to the prefix tokens (cls, register0) and is not drawn" in str(
        methods.attention(made).provenance.notes
    )
