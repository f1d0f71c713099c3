"""Maps of real models, compared with explicit implementations in timm."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import visattn
from tests import tiny
from tests.methods.truths import (
    BATCH,
    PRECISE,
    ROWS,
    Oracle,
    Truth,
    attention_gradient,
    gradient_rollout,
    on_grid,
    query_weights,
    relevance,
    rollout,
)
from tests.oracles import methods as oracles
from tests.oracles.maps import Array, array
from tests.oracles.methods import Carried
from visattn.core import methods
from visattn.core.methods import transition_attention
from visattn.core.records import Recording


class WrittenOut(TorchFunctionMode):
    """Model wrapper that stores the weights of every softmax of a forward pass."""

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
    """Return the library's recording of a model with gradients, and weights and gradients of its explicit form."""
    model, x = doubled(name)
    with visattn.capture(model, gradients=True) as made:
        logits = model(x)
    with WrittenOut(model) as written:
        again = model(x)
    gradients = torch.autograd.grad(again[:, 1].sum(), written.weights)
    return made.gradients(logits[:, 1]), [array(a) for a in written.weights], [array(g) for g in gradients]


def assert_close(found: Tensor, expected: Array) -> None:
    """Compare to 1e-10 of the largest value: queries, keys, values and gradients of a float64 model are stored in float64."""
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
    """Start relevance from `mean_h (dA * A)^+` of the head, and rollouts from its mean attention."""
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
    """Include layer scale, whose factors belong to the output projection."""
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
            expected = np.array([oracle(truth, **options)[7] for truth in truths])  # patch 1,2 after two prefix tokens
            assert_close(method(made, query="patch:1,2", **PRECISE, **options).values, on_grid(expected, made[0].keys))


@pytest.mark.parametrize("model", ["cls", "no prefix", "cls and 4 registers", "eva with rope"])
def test_legrad_of_a_real_model_equals_the_oracle_of_its_gradients(model: str) -> None:
    """Compute the score of a layer from the output of its block."""
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
        assert_close(methods.legrad(recorded, last_layers=layers, **PRECISE).values, on_grid(expected, made[0].keys))


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
