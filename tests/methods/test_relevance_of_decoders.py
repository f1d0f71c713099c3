"""Relevance of the object queries of a decoder equals the published recursion, computed from weights that autograd gives."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from visattn.errors import OptionError

WIDTH, HEADS, QUERIES, SIDE = 16, 2, 3, 4


class Detr(nn.Module):
    """One encoder layer, two decoder layers and class logits for each object query."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query_embed = nn.Conv2d(3, WIDTH, 4, 4), nn.Embedding(QUERIES, WIDTH)
        self.layers, self.head = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(5)), nn.Linear(WIDTH, 5)
        self.weights: list[Tensor] = []
        self.fused = True

    def attend(self, layer: int, asking: Tensor, asked: Tensor) -> Tensor:
        project = self.layers[layer]
        assert isinstance(project, nn.Linear)
        query, key, value = (
            F.linear(x, project.weight[i * WIDTH : (i + 1) * WIDTH]).unflatten(-1, (HEADS, -1)).transpose(1, 2)  # type: ignore[no-untyped-call]
            for i, x in enumerate((asking, asked, asked))
        )
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        weights = (query @ key.mT / (WIDTH // HEADS) ** 0.5).softmax(-1)
        self.weights.append(weights)
        return (weights @ value).transpose(1, 2).flatten(2)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        image = self.embed(x).flatten(2).mT
        image = image + self.attend(0, image, image)
        place = self.query_embed.weight[None].expand(len(x), -1, -1)
        q = torch.zeros_like(place)
        for layer in (1, 3):
            q = q + self.attend(layer, q + place, q + place)
            q = q + self.attend(layer + 1, q + place, image)
        return self.head(q)  # type: ignore[no-any-return]


def evidence_of(score: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the positive part of weights times gradient of each layer, averaged over heads, `(Q, K)`."""
    slopes = torch.autograd.grad(score, weights)
    return [(a * da).clamp(min=0).mean(1)[0].detach() for a, da in zip(weights, slopes, strict=True)]


def recursion(encoder: Sequence[Tensor], decoder: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the relevance of each cell for each query by equations 5 to 11 of Chefer et al., ICCV 2021, over dense matrices."""
    queries, cells = decoder[0][1].shape
    ii, qq, qi = torch.eye(cells), torch.eye(queries), torch.zeros(queries, cells)
    for one in encoder:
        ii = ii + one @ ii
    for among, across in decoder:
        qq, qi = qq + among @ qq, qi + among @ qi
        sides = []
        for matrix in (qq, ii):
            rest = matrix - torch.eye(len(matrix))
            sides.append(rest / rest.sum(-1, keepdim=True).where(rest.sum(-1, keepdim=True) != 0, 1) + torch.eye(len(matrix)))
        qi = qi + sides[0].T @ across @ sides[1]
    return qi


def published(model: Detr, x: Tensor, query: int, target: int) -> Tensor:
    """Return the relevance of a query from the weights that the model writes out."""
    model.fused, model.weights = False, []
    first, *rest = evidence_of(model(x)[0, query, target], model.weights)
    model.fused = True
    return recursion([first], list(zip(rest[::2], rest[1::2], strict=True)))[query].view(SIDE, SIDE)


@pytest.mark.parametrize("query", range(QUERIES))
def test_relevance_of_an_object_query_equals_the_published_recursion(query: int) -> None:
    torch.manual_seed(query)
    model, x = Detr().eval(), torch.randn(1, 3, 4 * SIDE, 4 * SIDE)
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.mul_(3)  # type: ignore[operator]
    with visattn.capture(model, gradients=True) as recording:
        logits = model(x)
    target = int(logits[0, query].argmax())
    found = visattn.methods.relevance(recording.gradients(logits[:, query, target]), query=f"object:{query}")
    expected = published(model, x, query, target)
    assert float(expected.max()) > 0
    assert torch.allclose(found.at(batch=0).values, expected, rtol=1e-5, atol=1e-7)


def test_a_decoder_asks_which_query_is_meant() -> None:
    model = Detr().eval()
    with visattn.capture(model, gradients=True) as recording:
        logits = model(torch.randn(1, 3, 4 * SIDE, 4 * SIDE))
    with pytest.raises(OptionError, match=r"outputs for 3 queries\. Choose one: query='query:0'"):
        visattn.methods.relevance(recording.gradients(logits[:, 0, 0]))


def test_relevance_of_transformers_detr_equals_the_recursion_on_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    model, inputs = import_module("libraries.transformers_models").build("DetrForObjectDetection")
    pixels, query = inputs["pixel_values"][:1, :, :, :160], 3  # 7 x 5 cells
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter *= 4
    seen = visattn.explain(
        model,
        pixels=pixels,
        mean=[0.5],
        std=[0.1],
        method="relevance",
        query=f"object:{query}",
        target=lambda out: out.logits[:, query, 1],
    )
    model.set_attn_implementation("eager")
    out = model(pixels, output_attentions=True)
    every = [*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions]
    found = evidence_of(out.logits[0, query, 1], every)
    encoder, among, across = (found[i : i + len(every) // 3] for i in range(0, len(every), len(every) // 3))
    expected = recursion(encoder, list(zip(among, across, strict=True)))[query]
    assert float(expected.max()) > 0
    assert torch.allclose(seen.map.values.flatten(), expected, atol=1e-5 * float(expected.max()))
