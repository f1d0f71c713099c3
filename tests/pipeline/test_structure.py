"""Methods that need parts of a model which no family names: blocks, head, output projection, input of the last attention.

For three models the parts are named here by hand, and the maps are computed with dense attention, hooks and loops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import visattn
from visattn.errors import OptionError

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": (32, 48),
    "patch_size": 8,
    "num_labels": 5,
}


class Parts(NamedTuple):
    """A model and its parts."""

    model: Any
    blocks: list[Any]
    norms: list[nn.Module]  # before the attention of each block
    head: Any  # from the output of a block to the logits
    scales: list[Tensor]  # factors of the attention's result, by block
    prefix: int


def _parts(name: str) -> Parts:
    torch.manual_seed(0)
    if name == "Dinov2":
        config: Any = transformers.Dinov2Config(**SMALL | {"image_size": 32}, mlp_ratio=2)  # its position embedding is square
        model: Any = transformers.Dinov2ForImageClassification(config)
        inner = model.dinov2
        head: Any = lambda x: torch.cat([inner.layernorm(x)[:, 0], inner.layernorm(x)[:, 1:].mean(1)], 1)  # noqa: E731
    else:
        config = getattr(transformers, f"{name}Config")(**SMALL, intermediate_size=32)
        model = getattr(transformers, f"{name}ForImageClassification")(config)
        inner = getattr(model, name.lower())
        head = lambda x: inner.layernorm(x)[:, 0]  # noqa: E731
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if "proj" in key else 0.3) + ("norm" in key))
    model.set_attn_implementation("eager")
    blocks = [
        part for part in model.modules() if hasattr(part, "attention") and (hasattr(part, "mlp") or hasattr(part, "intermediate"))
    ]
    norms = [part.norm1 if name == "Dinov2" else part.layernorm_before for part in blocks]
    scales = [part.layer_scale1.lambda1 if name == "Dinov2" else torch.ones(16) for part in blocks]
    return Parts(model.eval(), blocks, norms, lambda x: model.classifier(head(x)), scales, 2 if name == "DeiT" else 1)


@pytest.fixture(params=["ViT", "Dinov2", "DeiT"])
def parts(request: pytest.FixtureRequest) -> Parts:
    return _parts(request.param)


@pytest.fixture
def pixels() -> Tensor:
    return torch.randn(1, 3, 32, 48, generator=torch.Generator().manual_seed(1))


def explained(model: Any, pixels: Tensor, method: str, **options: Any) -> Tensor:
    found = visattn.explain(model, pixels=pixels, method=method, mean=[0.5], std=[0.1], **options).map.values
    assert found.shape[-2:] == (4, 6)
    return found


def close(found: Tensor, expected: Tensor) -> None:
    assert float(expected.abs().max()) > 0
    assert torch.allclose(found.flatten(), expected.flatten().to(found), atol=1e-5 * float(expected.abs().max()))


def test_legrad_uses_the_models_own_head_on_the_tokens_of_each_block(parts: Parts, pixels: Tensor) -> None:
    out = parts.model(pixels, output_attentions=True, output_hidden_states=True)
    total = torch.zeros(out.attentions[0].shape[-1])
    for layer, weights in enumerate(out.attentions):
        score = parts.head(out.hidden_states[layer + 1])[0, 3]
        (gradient,) = torch.autograd.grad(score, weights, retain_graph=True)
        for head in range(2):
            for row in gradient[0, head]:
                total += row.clamp(min=0) / (3 * 2 * len(row))
    close(explained(parts.model, pixels, "legrad", target=3), total[parts.prefix :])


def test_gradcam_reads_the_input_of_the_last_attention(parts: Parts, pixels: Tensor) -> None:
    kept: list[Tensor] = []
    handle = parts.norms[-1].register_forward_hook(lambda _module, _args, output: kept.append(output))
    logits = parts.model(pixels).logits[0]
    handle.remove()
    features, compared = kept[0][0, parts.prefix :].detach(), 0
    for target in range(5):
        (gradient,) = torch.autograd.grad(logits[target], kept, retain_graph=True)
        slopes = gradient[0, parts.prefix :]
        expected = torch.zeros(len(features))
        for cell in range(len(features)):
            expected[cell] = max(0.0, sum(float(slopes[:, k].mean() * features[cell, k]) for k in range(16)))
        if bool(expected.any()):  # of some classes nothing is positive
            close(explained(parts.model, pixels, "gradcam", target=target), expected)
            compared += 1
    assert compared > 1


def test_norm_attention_projects_the_values_of_each_head(parts: Parts, pixels: Tensor) -> None:
    kept: list[Tensor] = []
    attention = parts.blocks[-1].attention
    values_of, project = (
        next(part for name, part in attention.named_modules() if name.rpartition(".")[2] in names)
        for names in (("v_proj", "value"), ("o_proj", "dense"))  # older versions of transformers have the second
    )
    handle = values_of.register_forward_hook(lambda _module, _args, output: kept.append(output))
    with torch.no_grad():
        weights = parts.model(pixels, output_attentions=True).attentions[-1][0]
    handle.remove()
    values, projection = kept[0][0].view(-1, 2, 8), project.weight.detach() * parts.scales[-1].detach()[:, None]
    expected = torch.zeros(len(values) - parts.prefix)
    for cell in range(len(expected)):
        vector = torch.zeros(16)
        for head in range(2):
            vector += weights[head, 0, parts.prefix + cell] * (
                projection[:, 8 * head : 8 * head + 8] @ values[parts.prefix + cell, head]
            )
        expected[cell] = vector.norm()
    close(explained(parts.model, pixels, "norm_attention", query="cls"), expected)


def test_similarity_and_pca_read_the_tokens_of_the_last_block(parts: Parts, pixels: Tensor) -> None:
    kept: list[Tensor] = []
    handle = parts.blocks[-1].register_forward_hook(lambda _module, _args, output: kept.append(output))
    with torch.no_grad():
        parts.model(pixels)
    handle.remove()
    tokens = kept[0][0, parts.prefix :].double()
    here = tokens[6 * 2 + 4]
    cosines = torch.stack([(token @ here) / (token.norm() * here.norm()) for token in tokens])
    close(explained(parts.model, pixels, "similarity", query="patch:2,4"), cosines)
    centered = tokens - tokens.mean(0)
    first = torch.linalg.svd(centered).Vh[0]
    scores = centered @ (first * first[first.abs().argmax()].sign())
    close(explained(parts.model, pixels, "pca", components=1), scores)


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "deit_tiny_distilled_patch16_224",
        "beit_base_patch16_224",
        "cait_xxs24_224",
        "eva02_tiny_patch14_224",
    ],
)
def test_projection_on_the_tape_is_the_one_in_timms_source(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"depth": 2} | ({"depth_token_only": 1} if name.startswith("cait") else {})
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    pixels = torch.randn(1, 3, *model.default_cfg["input_size"][1:])

    def weights() -> list[Tensor | None]:
        with torch.no_grad(), visattn.capture(model, values=True) as recording:
            model(pixels)
        return [record.output_weight for record in recording]

    known = weights()
    monkeypatch.setattr("visattn.core.families.timm._projection", lambda *_: None)
    traced = weights()
    assert any(one is not None for one in known)
    for one, other in zip(known, traced, strict=True):
        if one is not None:
            assert other is not None
            assert torch.allclose(one, other)


class Mixed(nn.Module):
    """Attention whose heads are followed by something else than a linear layer that reads them in order."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.stem, self.qkv, self.proj = nn.Conv2d(3, 16, 8, 8), nn.Linear(16, 48), nn.Linear(16, 16)
        self.scale, self.norm = nn.Parameter(torch.randn(16)), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).view(len(x), -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v)  # (B, heads, N, d)
        if self.how == "heads last":
            out = out.permute(0, 2, 3, 1).flatten(2)
        elif self.how == "tokens mixed":
            out = out.reshape(len(x), -1, 16)
        else:
            out = out.transpose(1, 2).flatten(2)
        if self.how == "norm first":
            out = self.norm(out)
        if self.how == "gated":
            out = out * x.sigmoid()
        out = self.proj(out)
        if self.how == "norm after":
            out = self.norm(out)
        if self.how == "scaled":
            out = out * self.scale
        tokens: Tensor = x + out
        return tokens.mean(1)


@pytest.mark.parametrize(
    ("how", "known"),
    [
        ("plain", True),
        ("scaled", True),
        *[(how, False) for how in ("heads last", "tokens mixed", "norm first", "gated", "norm after")],
    ],
)
def test_projection_is_known_only_if_nothing_lies_between(how: str, known: bool) -> None:
    torch.manual_seed(0)
    model = Mixed(how).eval()
    for _ in range(2):  # the second time from the known tape
        with torch.no_grad(), visattn.capture(model, values=True) as recording:
            model(torch.randn(2, 3, 32, 48))
        weight = recording[0].output_weight
        assert (weight is not None) == known
        if weight is not None:
            factor = model.scale if how == "scaled" else torch.ones(16)
            assert torch.equal(weight, (model.proj.weight * factor[:, None]).detach())


class Shortcut(nn.Module):
    """A classifier whose head also reads the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = _parts("ViT").model

    def forward(self, x: Tensor) -> Tensor:
        found = self.vit(x, output_hidden_states=True)
        logits: Tensor = found.logits + found.hidden_states[1][:, 0, :5]
        return logits


def test_legrad_is_refused_if_the_head_reads_more_than_the_last_block(pixels: Tensor) -> None:
    with pytest.raises(OptionError, match="its head cannot be applied to the tokens of each layer"):
        explained(Shortcut().eval(), pixels, "legrad", target=1)
