"""Edits of the weights of small layers, and numbers of a recording that are not finite."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import tiny
from tests.capturing.watched import Layer, Model, image, tokens
from visattn.core.capturing.description import ModelDescription
from visattn.core.capturing.finite import _operands, check_finite
from visattn.core.capturing.interventions import _edited, intervene, masked, scaled
from visattn.core.capturing.tokens.arrangement import Arrangement
from visattn.core.operators import MatrixOperator, SampledOperator, SoftmaxOperator
from visattn.core.records import FeatureRecord, Recording
from visattn.errors import CaptureError, LayoutError, OptionError

# --- edits


def fused(x: Tensor) -> Tensor:
    q = tokens(x)
    return F.scaled_dot_product_attention(q, q, q, scale=1.0)


def written(x: Tensor) -> Tensor:
    q = tokens(x)
    return (q @ q.mT).softmax(-1) @ q


def summed(x: Tensor) -> Tensor:
    q = tokens(x)
    return ((q @ q.mT).softmax(-1)[..., None] * q[..., None, :, :]).sum(-2)


def gated(x: Tensor) -> Tensor:
    """Return attention behind a product that is a gate: a sum of copies of each token."""
    q = tokens(x)
    shares = q.softmax(-1)[..., None] * q[..., None, :]
    return fused(x) + shares.sum(-2) * 0


class Pair(nn.Module):
    """Two layers one after the other, `first` and `second`, whose results are added."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.first, self.second = Layer(run), Layer(run)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x) + 10 * self.second(x)
        return out


def run(model: nn.Module, layer: str, *edits: Any, heads: Any = None, **facts: Any) -> Tensor:
    with intervene(model, ModelDescription({}, "", **facts), layer, heads, edits):
        out: Tensor = model(image())
    return out


@pytest.mark.parametrize(
    ("attend", "layer", "first", "second"),
    [(fused, "first", 2, 10), (fused, "s*", 1, 20), (written, "*", 2, 20), (summed, "*[!x]t", 2, 10), (gated, "second", 1, 20)],
)
def test_layers_that_match_are_edited(attend: Any, layer: str, first: int, second: int) -> None:
    out = run(Pair(attend), layer, scaled(2.0))
    assert torch.allclose(out, (first + second) * fused(image()), atol=1e-4)


def test_weights_of_masked_tokens_go_to_the_others() -> None:
    x = image()
    q = tokens(x)
    weights = (q @ q.mT).softmax(-1)
    weights[..., 4] = 0
    expected = weights / weights.sum(-1, keepdim=True) @ q
    assert torch.allclose(run(Model(fused), "attn", masked([4], renormalize=True)), expected, atol=1e-5)
    assert torch.allclose(run(Model(fused), "attn", masked([4], renormalize=False)), weights @ q, atol=1e-5)


def test_only_these_heads_are_edited() -> None:
    def heads(x: Tensor) -> Tensor:
        q = torch.cat([tokens(x), tokens(x).cos()], 1)
        return F.scaled_dot_product_attention(q, q, q)

    out = run(Model(heads), "attn", scaled(0.0), heads=[1])
    assert torch.allclose(out[:, 0], heads(image())[:, 0], atol=1e-6)
    assert not out[:, 1].any()


@pytest.mark.parametrize("attend", [fused, gated])
def test_layers_without_the_name_are_listed(attend: Any) -> None:
    with pytest.raises(
        OptionError, match=r"^no attention layer matches 'third'\. The model's attention layers: first, second\.$"
    ):
        run(Pair(attend), "third", scaled(1.0))


def test_model_without_attention_has_no_layers() -> None:
    with pytest.raises(OptionError, match=r"attention layers: none\.$"):
        run(Model(lambda x: x + 1), "*", scaled(1.0))


def test_model_must_run_on_images() -> None:
    model = Model(lambda x: x + 1)

    def run_on(*given: Tensor) -> None:
        with intervene(model, ModelDescription({}, ""), "*", None, []):
            for x in given:
                model(x)

    with pytest.raises(CaptureError, match="was not run inside"):
        run_on()
    with pytest.raises(CaptureError, match="was given no floating-point"):
        run_on(torch.zeros(2))


def test_weights_of_points_or_of_unknown_tokens_are_not_edited() -> None:
    call: Any = SimpleNamespace(weigh=lambda: torch.ones(1, 1, 2, 2), rows=2, columns=2, lead=(1, 1))
    place = tiny.layout((), (1, 2))
    plain = Arrangement("self", place, place)
    assert torch.equal(_edited("attn", 0, call, plain, None, [scaled(3.0)]), torch.full((1, 1, 2, 2), 3.0))
    sampled: Any = SimpleNamespace(kind="sampled", reason=None)
    with pytest.raises(LayoutError, match=r"^attn: it weights points"):
        _edited("attn", 0, call, sampled, None, [])
    lost: Any = SimpleNamespace(kind="self", reason="lost", why="its tokens are mixed")
    with pytest.raises(LayoutError, match=r"^attn: its tokens are mixed, so"):
        _edited("attn", 0, call, lost, None, [])


# --- numbers that are not finite


def recording(*operators: Any, features: Any = ()) -> Recording:
    made = Recording(readout="cls", input_size=(32, 48))
    made.records = [tiny.record(operator, tiny.layout(), layer=f"layer{number}") for number, operator in enumerate(operators)]
    made.features = list(features)
    return made


def bad(*shape: int) -> Tensor:
    made = torch.ones(shape)
    made.view(-1)[1:3] = torch.tensor([math.nan, math.inf])
    return made


@pytest.mark.parametrize("name", ["query", "key"])
def test_operands_that_are_not_finite_are_counted(name: str) -> None:
    query, key = torch.ones(1, 2, 7, 4), torch.ones(1, 2, 7, 4)
    good = SoftmaxOperator(query, key)
    wrong = SoftmaxOperator(bad(1, 2, 7, 4), key) if name == "query" else SoftmaxOperator(query, bad(1, 2, 7, 4))
    check_finite(recording(good))
    made = recording(good, wrong)
    with pytest.raises(CaptureError, match=rf"^layer1: 2 of 56 {name} values are NaN or infinite"):
        check_finite(made)


def test_weights_that_are_not_finite_are_counted() -> None:
    cells, shares = torch.zeros(1, 2, 7, 3, dtype=torch.long), bad(1, 2, 7, 3)
    sampled = SampledOperator(cells, shares, 7)
    assert [(name, tensor is sampled.shares) for name, tensor in _operands(sampled).items()] == [("weight", True)]
    with pytest.raises(CaptureError, match=r"^layer0: 2 of 42 weight values"):
        check_finite(recording(sampled))
    with pytest.raises(CaptureError, match=r"^layer1: 2 of 98 weight values"):
        check_finite(recording(MatrixOperator(torch.ones(1, 2, 7, 7)), MatrixOperator(bad(1, 2, 7, 7))))


@pytest.mark.parametrize(("role", "name"), [("tokens", "token"), ("activation", "activation"), ("channel_gate", "channel_gate")])
def test_features_are_always_checked(role: Any, name: str) -> None:
    good, wrong = FeatureRecord("good", 0, role, torch.ones(1, 4)), FeatureRecord("wrong", 0, role, bad(1, 4))
    check_finite(recording(features=[good]))
    with pytest.raises(CaptureError, match=f"^wrong: 2 of 4 {name} values"):
        check_finite(recording(features=[good, wrong]))
