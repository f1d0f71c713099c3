"""Every method against its slow and literal version, on recordings made by hand and on real models written out by timm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import visattn
from tests import tiny
from tests.oracles import methods as oracles
from tests.oracles.maps import Array, array
from tests.oracles.methods import Attended, Carried
from visattn import methods
from visattn.geometry import Box
from visattn.methods import transition_attention
from visattn.operators import MatrixGradient, OuterGradient, SoftmaxOperator
from visattn.records import AttentionRecord, Recording, TokenLayout

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
places = pytest.mark.parametrize("place", list(PLACES))
WIDE = "1 + 2 x 100"  # more tokens than are computed at once
PLACES[WIDE] = (("cls",), (2, 100))


# recordings made by hand, and what they hold as arrays


class Truth(NamedTuple):
    """What one image of a recording holds: of each layer `(heads, N, N)` attention and gradient, values, and tokens `(N, D)`."""

    layers: list[Array]
    gradients: list[Array]
    carried: list[Carried]
    tokens: list[tuple[Array, Array]]
    prefix: int


@cache
def graded(place: str = "1 + 2 x 3", batch: int = BATCH, layers: int = LAYERS) -> Recording:
    """Random self-attention with values, what follows them, and gradients of attention and of tokens."""
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
    """`dA = dO V^T` of a record."""
    given: Any = record.operator.gradient
    out, value = array(given.out)[:, :, 0], array(given.value)[:, :, 0]
    return np.array([[out[b, h] @ value[b, h].T for h in range(out.shape[1])] for b in range(len(out))])


@cache
def truths(place: str = "1 + 2 x 3", batch: int = BATCH, layers: int = LAYERS) -> list[Truth]:
    """Of each image of the batch."""
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
    """`(B, N)`: the weight of each token in a query."""
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


def queries_of(layout: TokenLayout) -> list[Any]:
    """Names, a vector of weights, and one for each image."""
    tokens = len(layout)
    return ["auto", "patch:1,2", "mean", torch.rand(tokens) / tokens, torch.rand(BATCH, tokens) / tokens]


def on_grid(rows: Any, layout: TokenLayout) -> Array:
    """The patches of rows over all tokens, `(B, N)`."""
    patches: Array = np.array(rows)[:, len(layout.prefix) :]
    return patches.reshape(-1, *layout.grid)


# methods whose map is a row of one matrix

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


@rows
def test_gradient_given_whole_counts_like_the_one_of_the_result(name: str) -> None:
    made = graded()
    whole = [
        replace(record, operator=record.operator.with_gradient(MatrixGradient(torch.from_numpy(slopes(record)))))
        for record in made
    ]
    np.testing.assert_allclose(run(name, replace(made, records=whole)), run(name, made), **EXACT)


@cache
def wide() -> tuple[Recording, Recording]:
    """A recording of many tokens, and the same with the log-sum-exp of its rows, which spares the softmax in float32."""
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
    [
        "rollout of norms, measured, discard of layers",
        "relevance",
        "gradient rollout, discard of rows",
        "attention x gradient",
        "norm attention with residual",
    ],
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


# other shapes of maps


@places
def test_norms_of_heads_equal_their_oracle(place: str) -> None:
    made = graded(place)
    layout = made[0].keys
    whole = [oracles.norm_attention_of_heads(truth.layers[-1], truth.carried[-1]) for truth in truths(place)]
    for query in queries_of(layout):
        weights = query_weights(query, layout, made.readout)
        found = methods.norm_attention(made, heads=True, query=query, **PRECISE)
        assert found.axes == ("batch", "head")
        for h in range(tiny.HEADS):
            expected = [oracles.product(weights[b : b + 1], whole[b][h])[0] for b in range(BATCH)]
            np.testing.assert_allclose(found.values[:, h], on_grid(expected, layout), **EXACT)


@places
@pytest.mark.parametrize("layers", [None, 1, 2, 3])
def test_legrad_equals_its_oracle(layers: int | None, place: str) -> None:
    made = graded(place)
    expected = on_grid([oracles.legrad(truth.gradients, layers) for truth in truths(place)], made[0].keys)
    np.testing.assert_allclose(methods.legrad(made, layers=layers, **PRECISE).values, expected, **EXACT)


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
    """Capacities are rounded to 1e-6; of the edges that bound a flow each may count, as many as there are tokens."""
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
    """Three layers of attention over tokens, written out in float64: the graph holds the weights."""

    def __init__(self, place: str) -> None:
        self.made, self.pixels = graded(place), torch.randn(BATCH, len(graded(place)[0].keys), 16, dtype=torch.float64)
        self.projections = torch.randn(LAYERS, 4, 16, 16, dtype=torch.float64) * 0.4
        self.readout = torch.randn(16, dtype=torch.float64)

    def run(self, x: Tensor) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor], list[Tensor]]:
        """Queries and keys, weights, and their gradients of each layer."""
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
    """Of the matrix `mean_h (dA)^+` the mean of their rows."""
    assert_transition(place, queries_of(graded(place)[0].keys), steps=3, start_layer=0)


def test_transition_in_20_steps_equals_its_oracle() -> None:
    assert_transition("1 + 2 x 3", ["cls", "patch:1,2"], start_layer=2)


# what holds of every method

ALL: dict[str, Callable[[Recording, Any], Array]] = {
    **{name: partial(run, name) for name in ROWS},
    "norms of heads": lambda made, query: array(methods.norm_attention(made, heads=True, query=query, **PRECISE).values),
    "legrad": lambda made, _: array(methods.legrad(made, **PRECISE).values),
    "gradcam": lambda made, _: array(methods.gradcam(made, **PRECISE).values),
    "flow": lambda made, query: array(methods.attention_flow(made, query=query).values),
}
every = pytest.mark.parametrize("name", list(ALL))


def slack(name: str) -> Any:
    return {"atol": 1e-5, "rtol": 0} if name == "flow" else EXACT


def taken(made: Recording, images: slice, order: Tensor) -> Recording:
    """The same recording of some images, its tokens in another order."""

    def part(x: Any) -> Tensor:
        result: Tensor = x[images][..., order, :]
        return result

    records, features = [], []
    for record, feature in zip(made, made.features, strict=True):
        operator, given = record.operator, record.operator.gradient
        assert isinstance(operator, SoftmaxOperator)
        assert isinstance(given, OuterGradient)
        fresh = SoftmaxOperator(part(operator.query[:, :, 0]), part(operator.key[:, :, 0]), scale=operator.scale)
        fresh = fresh.with_gradient(OuterGradient(part(given.out[:, :, 0]), part(given.value[:, :, 0])))
        records.append(replace(record, operator=fresh, value=part(record.value), residual=part(record.residual)))
        features.append(replace(feature, value=part(feature.value), gradient=part(feature.gradient)))
    return replace(made, records=records, features=features)


@every
@pytest.mark.parametrize("place", ["0 + 3 x 5", "2 + 2 x 3"])
def test_batch_equals_its_images_one_by_one(name: str, place: str) -> None:
    made = graded(place)
    order = torch.arange(len(made[0].keys))
    for query in ("auto", "patch:1,2"):
        alone = [ALL[name](taken(made, slice(b, b + 1), order), query) for b in range(BATCH)]
        np.testing.assert_allclose(ALL[name](made, query), np.concatenate(alone), **EXACT)


@every
@pytest.mark.parametrize("place", ["0 + 3 x 5", "5 + 2 x 3"])
def test_map_moves_with_its_patches(name: str, place: str) -> None:
    made = graded(place)
    layout = made[0].keys
    prefix = len(layout.prefix)
    order = torch.cat([torch.arange(prefix), prefix + torch.randperm(layout.cells)])
    query = F.softmax(2 * torch.randn(len(layout)), 0)
    found = ALL[name](taken(made, slice(None), order), query[order]).reshape(BATCH, -1, layout.cells)
    expected = ALL[name](made, query).reshape(BATCH, -1, layout.cells)[..., order[prefix:] - prefix]
    np.testing.assert_allclose(found, expected, **slack(name))
    assert np.abs(found - ALL[name](made, query).reshape(found.shape)).max() > 1e-3


MASS = [name for name in ROWS if "ollout" in name]


@pytest.mark.parametrize("name", MASS)
@pytest.mark.parametrize("place", ["0 + 2 x 3", "0 + 3 x 5"])
def test_rows_without_prefix_sum_to_one(name: str, place: str) -> None:
    made = graded(place)
    for query in ("auto", "patch:1,2", F.softmax(torch.randn(len(made[0].keys), dtype=torch.float64), 0)):
        values = run(name, made, query)
        assert values.min() >= 0
        np.testing.assert_allclose(values.sum((1, 2)), 1, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in MASS if "discard" not in name and "gradient" not in name])
@pytest.mark.parametrize("place", ["1 + 2 x 3", "2 + 3 x 5", "5 + 2 x 3"])
def test_patches_and_prefix_sum_to_one(name: str, place: str) -> None:
    """With every token drawn as if it were a patch, the row is whole; its patches are the map."""
    made = graded(place)
    tokens, prefix = len(made[0].keys), len(made[0].keys.prefix)
    flat = tiny.layout((), (1, tokens))
    drawn = replace(made, records=[replace(record, queries=flat, keys=flat) for record in made])
    query = F.one_hot(torch.tensor(tokens - 1), tokens).float()
    whole = run(name, drawn, query).reshape(BATCH, tokens)
    np.testing.assert_allclose(whole.sum(1), 1, **EXACT)
    assert whole[:, :prefix].sum(1).min() > 1e-3
    np.testing.assert_allclose(run(name, made, query).reshape(BATCH, -1), whole[:, prefix:], **EXACT)


def graded_by(made: Recording, gradient: Callable[[AttentionRecord], Tensor]) -> Recording:
    return replace(
        made,
        records=[replace(r, operator=r.operator.with_gradient(MatrixGradient(gradient(r)))) for r in made],
    )


@pytest.mark.parametrize("name", ["relevance", "attention x gradient", "attention x gradient, signed", "legrad"])
def test_gradient_of_zero_gives_a_map_of_zero(name: str) -> None:
    none = graded_by(graded(), lambda record: torch.zeros(record.operator.shape, dtype=torch.float64))
    for query in ("auto", "patch:1,2"):
        assert not ALL[name](none, query).any()


@pytest.mark.parametrize("name", ["relevance", "attention x gradient", "legrad"])
def test_gradient_against_the_target_gives_a_map_of_zero(name: str) -> None:
    against = graded_by(graded(), lambda record: -torch.rand(record.operator.shape, dtype=torch.float64))
    assert not ALL[name](against, "auto").any()


@pytest.mark.parametrize("name", [name for name in MASS if "gradient" in name])
def test_gradient_rollout_of_no_gradient_leaves_the_query_alone(name: str) -> None:
    none = graded_by(graded(), lambda record: torch.zeros(record.operator.shape, dtype=torch.float64))
    values = run(name, none, "patch:1,2")
    assert np.argwhere(values).tolist() == [[b, 1, 2] for b in range(BATCH)]
    assert (values[:, 1, 2] == 1).all()


# several sets of tokens


def tokens_of(space: str, count: int) -> TokenLayout:
    """A set of tokens that lie nowhere."""
    name = "query" if space == "objects" else "word"
    return TokenLayout(space, tuple(f"{name}{i}" for i in range(count)), (), Box(0, 0, 1, 1))


SETS = {"image": tiny.layout(space="image"), "objects": tokens_of("objects", 3), "text": tokens_of("text", 4)}


class Composed(NamedTuple):
    """A recording, and the gradient of each of its records."""

    made: Recording
    gradients: list[Array]


def composed(calls: list[str], *, silent: bool = False) -> Composed:
    """Random attention and gradients of calls such as `objects > image`.

    With `silent` nothing speaks for the target in the first row of any layer.
    """
    made, gradients = Recording(input_size=tiny.INPUT), []
    for i, call in enumerate(calls):
        queries, keys = (SETS[name] for name in call.split(" > "))
        q, k = (torch.randn(BATCH, tiny.HEADS, len(place), 8) for place in (queries, keys))
        gradient = torch.randn(BATCH, tiny.HEADS, len(queries), len(keys), dtype=torch.float64)
        if silent:
            gradient[:, :, 0] = -gradient[:, :, 0].abs()
        operator = SoftmaxOperator(q, k).with_gradient(MatrixGradient(gradient))
        kind: Any = "self" if queries is keys else "cross"
        made.records.append(AttentionRecord(f"layers.{i}", 0, 0, kind, operator, queries, keys))
        gradients.append(array(gradient))
    return Composed(made, gradients)


def relevances(given: Composed, steps: list[list[int]], image: int) -> dict[tuple[str, str], Array]:
    """The matrices of one image; a step names the records that read the same state."""
    made, gradients = given
    attended = [
        [
            Attended(made[i].queries.space, made[i].keys.space, array(tiny.matrices(made[i]))[image], gradients[i][image])
            for i in step
        ]
        for step in steps
    ]
    return oracles.relevances(attended, {layout.space: len(layout) for r in made for layout in (r.queries, r.keys)})


IMAGE, OBJECTS, TEXT = "image > image", "objects > objects", "text > text"
LOOK, READ, ANSWER = "objects > image", "text > image", "image > text"
Steps = list[list[int]]


def one_by_one(count: int, start: int = 0) -> Steps:
    return [[i] for i in range(start, count)]


def assert_relevance(given: Composed, steps: Steps, **options: Any) -> None:
    """Of single tokens, of weighted ones, and of one vector for each image of the batch."""
    made = given.made
    last = next(record.queries for record in reversed(made.records) if record.keys.grid and not record.queries.grid)
    tokens = len(last)
    whole = [relevances(given, steps, b)[last.space, "image"] for b in range(BATCH)]
    for query in (F.one_hot(torch.tensor(1), tokens).float(), torch.rand(tokens), torch.rand(BATCH, tokens)):
        weights = query_weights(query, last, "")
        expected = [oracles.product(weights[b : b + 1], whole[b])[0] for b in range(BATCH)]
        found = methods.relevance(made, query=query, **options, **PRECISE).values
        assert float(found.abs().max()) > 1e-2
        np.testing.assert_allclose(found, on_grid(expected, SETS["image"]), **EXACT)


@pytest.mark.parametrize("silent", [False, True], ids=["", "with rows of zero"])
@pytest.mark.parametrize(
    "calls",
    [
        [IMAGE, IMAGE, OBJECTS, LOOK, OBJECTS, LOOK],
        [IMAGE, LOOK, LOOK, OBJECTS, LOOK],
        [LOOK, OBJECTS],
        [OBJECTS, LOOK, IMAGE, OBJECTS, LOOK],
    ],
    ids=["encoder, then decoder", "decoder that looks first", "no encoder", "image attends between"],
)
def test_relevance_of_objects_equals_its_oracle(calls: list[str], silent: bool) -> None:
    assert_relevance(composed(calls, silent=silent), one_by_one(len(calls)))


@pytest.mark.parametrize("start", [1, 2, 3, 5])
def test_relevance_of_objects_from_a_layer(start: int) -> None:
    calls = [IMAGE, IMAGE, OBJECTS, LOOK, OBJECTS, LOOK]
    assert_relevance(composed(calls), one_by_one(6, start), start_layer=start)


def test_object_is_called_by_its_number() -> None:
    made = composed([IMAGE, OBJECTS, LOOK]).made
    named = methods.relevance(made, query="query:1", **PRECISE).values
    assert torch.equal(named, methods.relevance(made, query=torch.tensor([0.0, 1.0, 0.0]), **PRECISE).values)


@pytest.mark.parametrize("silent", [False, True], ids=["", "with rows of zero"])
@pytest.mark.parametrize(
    ("calls", "steps"),
    [
        ([TEXT, IMAGE, READ, ANSWER, TEXT, IMAGE, READ, ANSWER, READ], [[0], [1], [2, 3], [4], [5], [6, 7], [8]]),
        ([TEXT, IMAGE, ANSWER, READ, TEXT, IMAGE, READ], [[0], [1], [2, 3], [4], [5], [6]]),
        ([READ, ANSWER, READ, ANSWER, READ], [[0, 1], [2, 3], [4]]),
        ([READ, TEXT, ANSWER, IMAGE, READ], [[0], [1], [2], [3], [4]]),
    ],
    ids=["text first", "image first", "nothing between", "not side by side"],
)
def test_relevance_of_text_equals_its_oracle(calls: list[str], steps: Steps, silent: bool) -> None:
    assert_relevance(composed(calls, silent=silent), steps)


@pytest.mark.parametrize(
    ("follows", "steps"),
    [(0, [[0], [1, 2], [3], [4]]), (1, [[0], [1], [2], [3], [4]])],
    ids=["reads the old text", "reads the text that has looked"],
)
def test_answer_that_follows_the_reading_is_a_step_of_its_own(follows: int, steps: Steps) -> None:
    made, gradients = composed([TEXT, READ, ANSWER, TEXT, READ])
    before = ["", "layers.0", f"layers.{follows}", "layers.2", "layers.3"]
    records = [replace(record, follows=(layer, 0)) for record, layer in zip(made, before, strict=True)]
    assert_relevance(Composed(replace(made, records=records), gradients), steps)


# real models, written out by timm


class WrittenOut(TorchFunctionMode):
    """Keeps the weights of every softmax of a forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        parts: list[Any] = [module for module in model.modules() if hasattr(module, "fused_attn")]
        for module in parts:
            module.fused_attn = False
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "softmax":
            self.weights.append(out)
        return out


def doubled(name: str) -> tuple[nn.Module, Tensor]:
    return tiny.MODELS[name].build().double(), tiny.pixels(BATCH).double()


@cache
def measured(name: str) -> tuple[Recording, list[Array], list[Array]]:
    """What the library records of a model with its gradients, and weights and gradients of the same model written out."""
    model, x = doubled(name)
    with visattn.capture(model, gradients=True) as made:
        logits = model(x)
    with WrittenOut(model) as written:
        again = model(x)
    gradients = torch.autograd.grad(again[:, 1].sum(), written.weights)
    return made.gradients(logits[:, 1]), [array(a) for a in written.weights], [array(g) for g in gradients]


def assert_close(found: Tensor, expected: Array) -> None:
    """To 1e-10 of the largest value: queries, keys, values and gradients of a model in float64 are kept in float64."""
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(array(found), expected, atol=1e-10 * np.abs(expected).max(), rtol=0)


REAL: dict[str, tuple[Any, Oracle]] = {
    "rollout": (methods.rollout, rollout),
    "relevance": (methods.relevance, relevance),
    "gradient rollout": (methods.gradient_rollout, gradient_rollout),
    "attention x gradient": (methods.attention_gradient, attention_gradient),
}


@pytest.mark.parametrize("model", list(tiny.MODELS))
@pytest.mark.parametrize("name", list(REAL))
def test_map_of_a_real_model_equals_the_oracle_of_its_weights(name: str, model: str) -> None:
    made, weights, gradients = measured(model)
    layout, (method, oracle) = made[0].keys, REAL[name]
    pooled = made.readout == "pool"
    whole = [
        oracle(
            Truth([a[b] for a in weights[: tiny.LAYERS]], [g[b] for g in gradients[: tiny.LAYERS]], [], [], len(layout.prefix))
        )
        for b in range(BATCH)
    ]
    for query in ["patch:1,2", "mean"] if pooled else ["patch:1,2", "mean", "auto"]:
        of_tokens = query_weights(query, layout, made.readout)
        expected = [oracles.product(of_tokens[b : b + 1], whole[b])[0] for b in range(BATCH)]
        assert_close(method(made, query=query, **PRECISE).values, on_grid(expected, layout))


POOLED = ["map pooling", "map pooling beside cls"]


@pytest.mark.parametrize("model", POOLED)
@pytest.mark.parametrize("name", ["rollout", "relevance", "gradient rollout"])
def test_map_of_a_pooling_model_starts_from_the_row_of_its_head(name: str, model: str) -> None:
    """Relevance from `mean_h (dA * A)^+` of the head, rollouts from its mean attention."""
    made, weights, gradients = measured(model)
    layout, (method, oracle) = made[0].keys, REAL[name]
    expected = []
    for b in range(BATCH):
        *layers, pool = (a[b] for a in weights)
        *slopes, slope = (g[b] for g in gradients)
        whole = oracle(Truth(layers, slopes, [], [], len(layout.prefix)))
        row = np.zeros((1, len(layout)))
        if name == "relevance":
            whole += np.eye(len(layout))
            row[:, -pool.shape[2] :] = oracles.positive(pool, slope)
        else:
            row[:, -pool.shape[2] :] = oracles.fused(pool)
        expected.append(oracles.product(row, whole)[0])
    assert_close(method(made, **PRECISE).values, on_grid(expected, layout))


@pytest.mark.parametrize("model", POOLED)
def test_attention_gradient_of_a_pooling_head_equals_its_oracle(model: str) -> None:
    made, weights, gradients = measured(model)
    expected = [oracles.attention_gradient([a], [g])[0] for a, g in zip(weights[-1], gradients[-1], strict=True)]
    found = methods.attention_gradient(made, layer="attn_pool", **PRECISE).values
    assert_close(found, np.reshape(expected, found.shape))


def test_norms_of_a_real_model_equal_the_oracle_of_its_weights() -> None:
    """With layer scale, whose factors are those of the projection behind the heads."""
    model = tiny.vit(init_values=0.5, reg_tokens=1).double()
    x, kept = tiny.pixels(BATCH).double(), []
    for block in model.get_submodule("blocks").children():
        scale = block.get_parameter("ls1.gamma")
        scale.data.mul_(torch.randn(scale.shape))
        block.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        block.get_submodule("attn.qkv").register_forward_hook(lambda _, __, out: kept.append(out))
    with torch.no_grad(), visattn.capture(model, values=True) as made:
        model(x)
    kept.clear()
    with torch.no_grad(), WrittenOut(model) as written:
        model(x)
    layers = [array(a) for a in written.weights]
    weights = [
        array(block.get_parameter("ls1.gamma")[:, None] * block.get_parameter("attn.proj.weight"))
        for block in model.get_submodule("blocks").children()
    ]
    values = [array(out.unflatten(-1, (3, tiny.HEADS, -1))[:, :, 2].transpose(1, 2)) for out in kept[1::2]]
    residuals = [array(x) for x in kept[::2]]
    truths = [
        Truth(
            [a[b] for a in layers],
            [],
            [Carried(v[b], w, x[b]) for v, w, x in zip(values, weights, residuals, strict=True)],
            [],
            2,
        )
        for b in range(BATCH)
    ]
    for name, (method, oracle, options) in ROWS.items():
        if method is methods.norm_attention or "norm" in name or "measured" in name:
            expected = np.array([oracle(truth, **options)[7] for truth in truths])  # patch 1,2 behind two tokens
            assert_close(method(made, query="patch:1,2", **PRECISE, **options).values, on_grid(expected, made[0].keys))


@pytest.mark.parametrize("model", ["cls", "no prefix", "cls and 4 registers", "eva with rope"])
def test_legrad_of_a_real_model_equals_the_oracle_of_its_gradients(model: str) -> None:
    """The score of a layer is what stands behind its block."""
    vit, x = doubled(model)
    scores: list[Tensor] = []
    for block in vit.get_submodule("blocks").children():
        block.register_forward_hook(lambda _, __, out: scores.append(out.mean(1).square().sum()))
    with visattn.capture(vit, gradients=True) as made:
        vit(x)
    recorded = made.gradients(dict(zip(made.layers, scores, strict=True)))
    scores.clear()
    with WrittenOut(vit) as written:
        vit(x)
    gradients = [
        array(torch.autograd.grad(score, a, retain_graph=True)[0]) for score, a in zip(scores, written.weights, strict=True)
    ]
    for layers in (None, 1):
        expected = [oracles.legrad([g[b] for g in gradients], layers) for b in range(BATCH)]
        assert_close(methods.legrad(recorded, layers=layers, **PRECISE).values, on_grid(expected, made[0].keys))


@pytest.mark.parametrize("model", list(tiny.MODELS))
def test_gradcam_of_a_real_model_equals_the_oracle_of_its_gradients(model: str) -> None:
    vit, x = doubled(model)
    kept: list[Tensor] = []
    vit.get_submodule("blocks.1.norm1").register_forward_hook(lambda _, __, out: kept.append(out))
    with visattn.capture(vit, gradients=True, features="blocks.*.norm1") as made:
        logits = vit(x)
    found = methods.gradcam(made.gradients(logits[:, 1]), **PRECISE).values
    (gradient,) = torch.autograd.grad(vit(x)[:, 1].sum(), kept[-1:])
    prefix = len(tiny.MODELS[model].prefix)
    expected = [oracles.gradcam(array(kept[-1])[b], array(gradient)[b], prefix) for b in range(BATCH)]
    assert_close(found, np.reshape(expected, found.shape))


@pytest.mark.parametrize("model", ["cls", "no prefix", "cls and 4 registers", "cls and distillation"])
def test_transition_of_a_real_model_equals_the_oracle_of_its_weights(model: str) -> None:
    vit, x = doubled(model)

    def replay(edit: Callable[[Tensor], Tensor]) -> Recording:
        with visattn.capture(vit, gradients=True) as recording:
            logits = vit(edit(x))
        return recording.gradients(logits[:, 1])

    made = replay(lambda x: x)
    found = transition_attention(made, replay=replay, steps=3, start_layer=0, **PRECISE).values
    last = []
    for alpha in (0, 0.5, 1):
        with WrittenOut(vit) as written:
            score = vit(alpha * x)[:, 1].sum()
        last.append(array(torch.autograd.grad(score, written.weights)[-1]))
    layers, query = [array(a) for a in written.weights], query_weights("auto", made[0].keys, made.readout)
    expected = [oracles.transition_attention([a[b] for a in layers], [g[b] for g in last], query[b]) for b in range(BATCH)]
    assert_close(found, on_grid(expected, made[0].keys))
