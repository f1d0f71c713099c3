"""Hand-made recordings, their contents as arrays, and the oracle of each method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.oracles import methods as oracles
from tests.oracles.maps import Array, array
from tests.oracles.methods import Carried
from visattn.core import methods
from visattn.core.operators import OuterGradient
from visattn.core.records import AttentionRecord, Recording, TokenLayout

BATCH, LAYERS = 3, 3


EXACT: Any = {"atol": 1e-10, "rtol": 1e-10}


PRECISE: Any = {"dtype": torch.float64}


READOUTS = {
    (): "mean",
    ("cls",): "cls",
    ("cls", "distillation"): "cls+distillation",
    ("cls", *tiny.REGISTERS): "cls",
}


PLACES = {f"{len(prefix)} + {r} x {c}": (prefix, (r, c)) for prefix in READOUTS for r, c in [(2, 3), (3, 5)]}
WIDE = "1 + 2 x 100"  # more tokens than fit into one tile
PLACES[WIDE] = (("cls",), (2, 100))


class Truth(NamedTuple):
    """Contents of one image of a recording: `(heads, N, N)` attention and gradient per layer, values, and tokens `(N, D)`."""

    layers: list[Array]
    gradients: list[Array]
    carried: list[Carried]
    tokens: list[tuple[Array, Array]]
    prefix: int


@cache
def graded(place: str = "1 + 2 x 3", batch: int = BATCH, layers: int = LAYERS) -> Recording:
    """Build random self-attention with values, output projections, and gradients of attention and tokens."""
    prefix, grid = PLACES[place]
    made = tiny.recording(batch=batch, layers=layers, prefix=prefix, grid=grid, readout=READOUTS[prefix])
    tokens = len(made[0].keys)
    noise = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for i, record in enumerate(made.records):
        assert record.value is not None
        out = noise(record.value.shape)
        made.records[i] = replace(
            record,
            operator=record.operator.with_gradient(OuterGradient(out, record.value)),
            output_weight=noise(12, 16) * 0.3,
            residual=noise(batch, tokens, 12),
        )
        made.features[i] = replace(made.features[i], gradient=noise(batch, tokens, 16))
    return made


def slopes(record: AttentionRecord) -> Array:
    """Compute `dA = dO V^T` of a record."""
    given: Any = record.operator.gradient
    out, value = array(given.out)[:, :, 0], array(given.value)[:, :, 0]
    return np.array([[out[b, h] @ value[b, h].T for h in range(out.shape[1])] for b in range(len(out))])


@cache
def truths(place: str = "1 + 2 x 3", batch: int = BATCH, layers: int = LAYERS) -> list[Truth]:
    """Return the contents of each image of the batch."""
    made = graded(place, batch, layers)
    attention, gradients = [array(tiny.matrices(record)) for record in made], [slopes(record) for record in made]
    truths = []
    for b in range(len(attention[0])):
        carried = [
            Carried(array(record.value)[b], array(record.output_weight), array(record.residual)[b])
            for record in made
            if record.value is not None and record.output_weight is not None and record.residual is not None
        ]
        tokens = [(array(f.value)[b], array(f.gradient)[b]) for f in made.features if f.gradient is not None]
        truths.append(Truth([a[b] for a in attention], [g[b] for g in gradients], carried, tokens, len(made[0].keys.prefix)))
    return truths


def query_weights(query: Any, layout: TokenLayout, readout: str) -> Array:
    """Return the weight of each token in a query, `(B, N)`."""
    tokens, prefix = len(layout), len(layout.prefix)
    if isinstance(query, Tensor):
        return array(query.expand(BATCH, -1))
    named = readout if query == "auto" else query
    chosen = {
        "cls": [0],
        "cls+distillation": [0, 1],
        "mean": list(range(prefix, tokens)),
        "patch:1,2": [prefix + layout.grid[1] + 2],
    }[named]
    weights = np.zeros((BATCH, tokens))
    weights[:, chosen] = 1 / len(chosen)
    return weights


def on_grid(rows: Any, layout: TokenLayout) -> Array:
    """Return the patches of rows over all tokens, `(B, N)`."""
    patches: Array = np.array(rows)[:, len(layout.prefix) :]
    return patches.reshape(-1, *layout.grid)


Oracle = Callable[..., Array]


def rollout(truth: Truth, **options: Any) -> Array:
    return oracles.rollout(truth.layers, truth.carried, prefix=truth.prefix, **options)


def gradient_rollout(truth: Truth, **options: Any) -> Array:
    return oracles.gradient_rollout(truth.layers, truth.gradients, prefix=truth.prefix, **options)


def relevance(truth: Truth, **options: Any) -> Array:
    return oracles.relevance(truth.layers, truth.gradients, **options)


def attention_gradient(truth: Truth, *, layer: Any = "all", head: Any = "all", signed: bool = False) -> Array:
    layers, gradients = (x if layer == "all" else [x[layer]] for x in (truth.layers, truth.gradients))
    chosen = slice(None) if head == "all" else [head]
    return oracles.attention_gradient([a[chosen] for a in layers], [g[chosen] for g in gradients], signed=signed)


def norm_attention(truth: Truth, *, layer: int = -1, add_residual: bool = False) -> Array:
    return oracles.norm_attention(truth.layers[layer], truth.carried[layer], residual=add_residual)


ROWS: dict[str, tuple[Any, Oracle, dict[str, Any]]] = {
    "rollout": (methods.rollout, rollout, {}),
    "rollout, max": (methods.rollout, rollout, {"fusion": "max", "residual": 0.3}),
    "rollout, min from layer 1": (methods.rollout, rollout, {"fusion": "min", "residual": 0.8, "start_layer": 1}),
    "rollout of norms": (methods.rollout, rollout, {"weights_by": "norm"}),
    "rollout, measured": (methods.rollout, rollout, {"residual": "measured"}),
    "rollout, max, measured": (methods.rollout, rollout, {"fusion": "max", "residual": "measured"}),
    "rollout of norms, measured": (methods.rollout, rollout, {"weights_by": "norm", "residual": "measured", "start_layer": 1}),
    "rollout, discard of rows": (methods.rollout, rollout, {"discard": 0.5}),
    "rollout, discard nearly all": (methods.rollout, rollout, {"discard": 0.99, "residual": 0.2}),
    "rollout, discard of layers": (methods.rollout, rollout, {"discard": 0.5, "discard_over": "layer"}),
    "rollout, max, discard of rows": (methods.rollout, rollout, {"fusion": "max", "discard": 0.7}),
    "rollout, min, discard of layers": (methods.rollout, rollout, {"fusion": "min", "discard": 0.7, "discard_over": "layer"}),
    "rollout of norms, discard of rows": (methods.rollout, rollout, {"weights_by": "norm", "discard": 0.4}),
    "rollout, measured, discard of rows": (methods.rollout, rollout, {"residual": "measured", "discard": 0.4}),
    "rollout of norms, measured, discard of layers": (
        methods.rollout,
        rollout,
        {"weights_by": "norm", "residual": "measured", "discard": 0.6, "discard_over": "layer"},
    ),
    "relevance": (methods.relevance, relevance, {}),
    "relevance from layer 1": (methods.relevance, relevance, {"start_layer": 1}),
    "gradient rollout": (methods.gradient_rollout, gradient_rollout, {}),
    "gradient rollout, discard of layers": (methods.gradient_rollout, gradient_rollout, {"discard": 0.7}),
    "gradient rollout, discard of rows": (
        methods.gradient_rollout,
        gradient_rollout,
        {"discard": 0.7, "discard_over": "row", "start_layer": 1},
    ),
    "gradient rollout, no discard": (methods.gradient_rollout, gradient_rollout, {"discard": 0}),
    "attention x gradient": (methods.attention_gradient, attention_gradient, {}),
    "attention x gradient, signed": (methods.attention_gradient, attention_gradient, {"signed": True}),
    "attention x gradient of one layer": (methods.attention_gradient, attention_gradient, {"layer": 1}),
    "attention x gradient of one head": (
        methods.attention_gradient,
        attention_gradient,
        {"layer": -1, "head": 1, "signed": True},
    ),
    "norm attention": (methods.norm_attention, norm_attention, {}),
    "norm attention with residual": (methods.norm_attention, norm_attention, {"layer": 0, "add_residual": True}),
}


rows = pytest.mark.parametrize("name", list(ROWS))


def run(name: str, made: Recording, query: Any = "auto") -> Array:
    method, _, options = ROWS[name]
    return array(method(made, query=query, **PRECISE, **options).values)
