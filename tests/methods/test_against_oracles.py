"""Maps of hand-made recordings, compared with the oracles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import tiny
from tests.methods.truths import (
    BATCH,
    EXACT,
    LAYERS,
    PLACES,
    PRECISE,
    ROWS,
    WIDE,
    graded,
    on_grid,
    query_weights,
    rows,
    run,
    slopes,
    truths,
)
from tests.oracles import methods as oracles
from tests.oracles.maps import array
from tests.samples import sampled
from visattn.core import methods
from visattn.core.methods import transition_attention
from visattn.core.operators import MatrixGradient, OuterGradient, SoftmaxOperator
from visattn.core.records import Recording, TokenLayout

# `make test` runs one grid for each prefix, and both for the class token; `make evidence` also the others
places = pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=[pytest.mark.evidence] if place.endswith("3 x 5") and not place.startswith("1 +") else [])
        for place in PLACES
        if place != WIDE
    ],
)


def queries_of(layout: TokenLayout) -> list[Any]:
    """Return queries as names, as a vector of weights, and as one vector per image."""
    tokens = len(layout)
    return ["auto", "patch:1,2", "mean", torch.rand(tokens) / tokens, torch.rand(BATCH, tokens) / tokens]


@places
@rows
def test_map_equals_its_oracle(name: str, place: str) -> None:
    made, (_, oracle, options) = graded(place), ROWS[name]
    layout = made[0].keys
    whole = [oracle(truth, **options) for truth in truths(place)]
    for query in queries_of(layout):
        weights = query_weights(query, layout, made.readout)
        expected = [oracles.product(weights[b : b + 1], whole[b])[0] for b in range(BATCH)]
        np.testing.assert_allclose(run(name, made, query), on_grid(expected, layout), **EXACT)


@pytest.mark.parametrize(
    "name", [name for name, (_, _, options) in ROWS.items() if not options.keys() & {"layer", "start_layer"}]
)
def test_map_of_one_layer_equals_its_oracle(name: str) -> None:
    place = "1 + 2 x 3"
    made, (_, oracle, options) = graded(place, layers=1), ROWS[name]
    whole = np.stack([oracle(truth, **options) for truth in truths(place, BATCH, 1)])
    np.testing.assert_allclose(run(name, made, "cls"), on_grid(whole[:, 0], made[0].keys), **EXACT)


@rows
def test_a_dense_gradient_equals_the_gradient_of_the_attention_output(name: str) -> None:
    made = graded()
    whole = [
        replace(record, operator=record.operator.with_gradient(MatrixGradient(torch.from_numpy(slopes(record)))))
        for record in made
    ]
    np.testing.assert_allclose(run(name, replace(made, records=whole)), run(name, made), **EXACT)


@cache
def wide() -> tuple[Recording, Recording]:
    """Build a recording of many tokens, and a copy with the log-sum-exp of its rows, which avoids the softmax in float32."""
    made, known = graded(WIDE, 1, 2), []
    for record in made:
        operator: Any = record.operator
        query, key = operator.query[:, :, 0], operator.key[:, :, 0]
        lse = (query.double() @ key.double().mT * operator.scale).logsumexp(-1).float()
        known.append(replace(record, operator=SoftmaxOperator(query, key, lse=lse).with_gradient(operator.gradient)))
    return made, replace(made, records=known)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    sampled(
        [
            "rollout of norms, measured, discard of layers",
            "relevance",
            "gradient rollout, discard of rows",
            "attention x gradient",
            "norm attention with residual",
        ],
        3,
    ),
)
def test_map_of_many_tokens_equals_its_oracle(name: str) -> None:
    (made, known), (method, oracle, options) = wide(), ROWS[name]
    query = torch.rand(len(made[0].keys)) / len(made[0].keys)
    expected = on_grid(oracles.product(array(query)[None], oracle(*truths(WIDE, 1, 2), **options)), made[0].keys)
    np.testing.assert_allclose(run(name, made, query), expected, **EXACT)
    rounded = method(known, query=query, **options).values
    np.testing.assert_allclose(rounded, expected, atol=2e-5 * expected.max(), rtol=0)


def test_legrad_of_many_tokens_equals_its_oracle() -> None:
    place = tiny.layout(("cls",), (20, 41))
    out, value = torch.randn(2, 1, 2, len(place), 8, dtype=torch.float64)
    operator = SoftmaxOperator(*tiny.operands(len(place))).with_gradient(OuterGradient(out, value))
    made = Recording(records=[tiny.record(operator, place)])
    expected = oracles.legrad([array(out)[0] @ array(value)[0].transpose(0, 2, 1)])
    np.testing.assert_allclose(methods.legrad(made, **PRECISE).values, on_grid([expected], place), **EXACT)


@places
def test_norms_of_heads_equal_their_oracle(place: str) -> None:
    made = graded(place)
    layout = made[0].keys
    whole = [oracles.norm_attention_of_heads(truth.layers[-1], truth.carried[-1]) for truth in truths(place)]
    for query in queries_of(layout):
        weights = query_weights(query, layout, made.readout)
        found = methods.norm_attention(made, keep_heads=True, query=query, **PRECISE)
        assert found.axes == ("batch", "head")
        for h in range(tiny.HEADS):
            expected = [oracles.product(weights[b : b + 1], whole[b][h])[0] for b in range(BATCH)]
            np.testing.assert_allclose(found.values[:, h], on_grid(expected, layout), **EXACT)


@places
@pytest.mark.parametrize("layers", [None, 1, 2, 3])
def test_legrad_equals_its_oracle(layers: int | None, place: str) -> None:
    made = graded(place)
    expected = on_grid([oracles.legrad(truth.gradients, layers) for truth in truths(place)], made[0].keys)
    np.testing.assert_allclose(methods.legrad(made, last_layers=layers, **PRECISE).values, expected, **EXACT)


@places
@pytest.mark.parametrize("layer", [-1, 0])
def test_gradcam_equals_its_oracle(layer: int, place: str) -> None:
    made = graded(place)
    layout = made[0].keys
    expected = [oracles.gradcam(*truth.tokens[layer], len(layout.prefix)) for truth in truths(place)]
    assert 0 < np.count_nonzero(expected) < np.size(expected)
    found = methods.gradcam(made, layer=layer, **PRECISE).values
    np.testing.assert_allclose(found, np.reshape(expected, (BATCH, *layout.grid)), **EXACT)


@pytest.mark.parametrize("options", [{}, {"residual": 0.2}, {"start_layer": 2, "residual": 0}], ids=str)
@pytest.mark.parametrize("place", [place for place in PLACES if place.endswith("2 x 3")])
def test_flow_equals_its_oracle(place: str, options: dict[str, Any]) -> None:
    """Allow the rounding of capacities to 1e-6 on each edge that bounds a flow, up to the number of tokens."""
    made = graded(place)
    layout = made[0].keys
    for query in queries_of(layout)[:4]:
        weights = query_weights(query, layout, made.readout)
        found = methods.attention_flow(made, query=query, **options).values
        expected = [
            oracles.attention_flow(truth.layers, weights[b] / weights[b].sum(), **options)
            for b, truth in enumerate(truths(place))
        ]
        np.testing.assert_allclose(found, on_grid(expected, layout), atol=1e-6 * len(layout), rtol=0)


class Written:
    """Three layers of explicit float64 attention over tokens, so that the weights are in the autograd graph."""

    def __init__(self, place: str) -> None:
        self.made, self.pixels = graded(place), torch.randn(BATCH, len(graded(place)[0].keys), 16, dtype=torch.float64)
        self.projections = torch.randn(LAYERS, 4, 16, 16, dtype=torch.float64) * 0.4
        self.readout = torch.randn(16, dtype=torch.float64)

    def run(self, x: Tensor) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor], list[Tensor]]:
        """Return queries and keys, weights, and their gradients for each layer."""
        x, operands, weights = x.clone().requires_grad_(), [], []
        for projections in self.projections:
            q, k, v, out = ((x @ w).unflatten(-1, (tiny.HEADS, -1)).transpose(1, 2) for w in projections)
            operands.append((q.detach(), k.detach()))
            weights.append((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1))
            x = x + (weights[-1] @ v * out).transpose(1, 2).flatten(2)
        score = (x @ self.readout / 16).tanh().sum()
        return operands, [a.detach() for a in weights], list(torch.autograd.grad(score, weights))

    def recorded(self, edit: Callable[[Tensor], Tensor] = lambda x: x) -> Recording:
        operands, _, gradients = self.run(edit(self.pixels))
        records = [
            replace(record, operator=SoftmaxOperator(*operand).with_gradient(MatrixGradient(gradient)))
            for record, operand, gradient in zip(self.made, operands, gradients, strict=True)
        ]
        return replace(self.made, records=records)


def assert_transition(place: str, queries: list[Any], tolerance: float = 1e-10, **options: Any) -> None:
    written = Written(place)
    made, steps = written.recorded(), options.get("steps", 20)
    layout, (_, weights, _) = made[0].keys, written.run(written.pixels)
    last = [written.run(written.pixels * (k / (steps - 1)))[2][-1] for k in range(steps)]
    for query in queries:
        of_tokens = query_weights(query, layout, made.readout)
        found = transition_attention(made, replay=written.recorded, query=query, **options, **PRECISE).values
        expected = [
            oracles.transition_attention(
                [array(a[b]) for a in weights], [array(g[b]) for g in last], of_tokens[b], start_layer=options["start_layer"]
            )
            for b in range(BATCH)
        ]
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(found, on_grid(expected, layout), atol=tolerance, rtol=0)


@places
@pytest.mark.parametrize("options", [{"steps": 5, "start_layer": 0}, {"steps": 3, "start_layer": 1}], ids=str)
def test_transition_of_one_token_equals_its_oracle(place: str, options: dict[str, Any]) -> None:
    tokens = len(graded(place)[0].keys)
    assert_transition(place, ["patch:1,2", F.one_hot(torch.tensor(0), tokens)], **options)


@places
def test_transition_of_several_tokens_equals_its_oracle(place: str) -> None:
    """Use the mean of the tokens' rows of the matrix `mean_h (dA)^+`."""
    assert_transition(place, queries_of(graded(place)[0].keys), steps=3, start_layer=0)


def test_transition_in_20_steps_equals_its_oracle() -> None:
    assert_transition("1 + 2 x 3", ["cls", "patch:1,2"], start_layer=2)
