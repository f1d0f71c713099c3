"""Models that return nothing, attend among no tokens, or give a score that is no number: one line says so, or the answer stands."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from visattn import evaluation
from visattn.core.pipeline.inputs import prepare
from visattn.core.pipeline.summable import terms_refusal
from visattn.core.pipeline.target_choices import choices_of
from visattn.errors import ModelError, OptionError, UnsupportedModel, VisattnError


class Model(nn.Module):
    def __init__(self, tokens: Callable[[Tensor], Tensor], output: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.patches, self.attention, self.head = (
            nn.Conv2d(3, 8, 16, 16),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 3),
        )
        self.of_tokens, self.of_output = tokens, output

    def forward(self, pixels: Tensor) -> object:
        tokens = self.of_tokens(self.patches(pixels).flatten(2).mT)
        tokens = self.attention(tokens, tokens, tokens)[0]
        return self.of_output(self.head(tokens.mean(1)))


def same(x: Tensor) -> Tensor:
    return x


MODELS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], object]]] = {
    "no classes": (same, lambda out: out[:, :0]),
    "no images": (same, lambda out: out[:0]),
    "an empty list": (same, lambda _: []),
    "no tokens": (lambda tokens: tokens[:, :0], same),
    "no token above a limit": (lambda tokens: tokens[:, tokens[0, :, 0] > 1e9], same),
    "one number": (same, lambda out: out.sum()),
    "no memory": (same, lambda out: out.to("meta")),
    "text": (same, lambda _: "text"),
    "whole numbers": (same, lambda out: out.long()),
    "truth values": (same, lambda out: out > 0),
    "complex numbers": (same, lambda out: out.to(torch.complex64)),
    "NaN": (same, lambda out: out * float("nan")),
    "infinity": (same, lambda out: out + float("inf")),
}
METHODS = [
    "auto",
    "attention",
    "rollout",
    "relevance",
    "gradcam",
    "legrad",
    "saliency",
    "input_x_gradient",
    "eigencam",
    "pca",
    "contributions",
    "captum.occlusion",
]
every = pytest.mark.parametrize("name", list(MODELS))


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(*MODELS[name]).eval()


def photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8))


@every
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", [None, 0, "output:0"])
@pytest.mark.filterwarnings("ignore")
def test_every_method_answers_or_says_why_not(name: str, method: str, target: int | str | None) -> None:
    try:
        explained = visattn.explain(model(name), photo(), method=method, target=target)
    except VisattnError as error:
        explained, text = None, str(error)
    if explained is None:
        assert "\n" not in text
        return
    assert explained.map.values.isfinite().all()
    assert all(np.isfinite(score["score"]) for score in explained.provenance.scores)
    explained.overlay()


@every
@pytest.mark.filterwarnings("ignore")
def test_targets_and_terms_are_told(name: str) -> None:
    of = model(name)
    prepared = prepare(photo(), of)
    with torch.no_grad():
        output = of(prepared.pixels)
    for choice in choices_of(of, prepared, output):
        assert not choice.example.startswith("class:") or name.startswith("no token")
    refused = terms_refusal(of, prepared)
    assert refused is None or "\n" not in refused


@pytest.mark.parametrize("name", ["no tokens", "NaN", "infinity"])
@pytest.mark.parametrize("target", [0, "output:0"])
def test_a_score_that_is_no_number_is_no_target(name: str, target: int | str) -> None:
    with pytest.raises(ModelError, match="the score is NaN or infinite"):
        visattn.explain(model(name), photo(), method="gradcam", target=target)


@pytest.mark.parametrize("name", ["no tokens", "no token above a limit"])
def test_values_of_attention_without_tokens_are_captured(name: str) -> None:
    of = model(name)
    with torch.no_grad(), visattn.capture(of, values=True, outputs=True) as recording:
        of(torch.rand(1, 3, 224, 224))
    assert [record.layer for record in recording] == ["attention"]


@pytest.mark.parametrize("name", ["no tokens", "no token above a limit"])
def test_attention_without_tokens_has_no_statistics(name: str) -> None:
    of = model(name)
    with torch.no_grad(), visattn.capture(of) as recording:
        of(torch.rand(1, 3, 224, 224))
    with pytest.raises(OptionError, match="no tokens"):
        evaluation.statistics(recording)
    with pytest.raises(UnsupportedModel, match="there are no tokens in attention"):
        evaluation.Survey(of).add(photo(), "photo")
