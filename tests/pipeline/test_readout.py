"""Explanations of models whose tape does not tell what they read: `explain` measures it, for each photo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import visattn
from tests import tiny
from visattn.core.methods import METHODS
from visattn.errors import OptionError, StudyError

NAMED = [
    name
    for name, method in METHODS.items()
    if "query" in method.parameters and name not in ("similarity", "transition_attention", "positions")
]


def max_pooling(**options: Any) -> Any:
    torch.manual_seed(0)
    kinds = {
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 4,
        "img_size": 64,
        "class_token": False,
        "global_pool": "max",
    }
    model = timm.create_model("vit_tiny_patch16_224", **kinds | options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model


def photo(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC)


def shares(model: Any, pixels: Tensor, score: int | None = None) -> Tensor:
    """Return the shares of the tokens behind the last norm, by autograd; of all outputs together without a score."""
    kept: list[Tensor] = []
    handle = model.norm.register_forward_hook(lambda _module, _args, out: kept.append(out))
    logits = model(pixels)
    handle.remove()
    slopes = [torch.autograd.grad(logits[:, i].sum(), kept, retain_graph=True)[0] for i in range(4) if score in (None, i)]
    norms: Tensor = torch.stack(slopes).norm(dim=(0, -1))
    return norms / norms.sum(1, keepdim=True)


def prepared(model: Any, *photos: Image.Image) -> Tensor:
    return torch.cat([visattn.prepare(one, model).pixels for one in photos])


@pytest.mark.parametrize("name", NAMED)
def test_the_query_of_a_model_with_max_pooling_is_read(name: str) -> None:
    model = max_pooling()
    target: dict[str, Any] = {"target": 1} if METHODS[name].targeted else {}
    found = visattn.explain(model, photo(0), method=name, **target)
    assert found.provenance.parameters["query"] == "read"
    weights = shares(model, prepared(model, photo(0)), 1 if target else None)[0].detach()
    expected = visattn.explain(model, photo(0), method=name, query=weights, **target)
    torch.testing.assert_close(found.map.values, expected.map.values, rtol=1e-4, atol=1e-6)
    if name in ("attention", "rollout"):
        assert not torch.allclose(
            found.map.values, visattn.explain(model, photo(0), method=name, query="mean").map.values, rtol=0.05
        )


def test_each_photo_has_a_query_of_its_own() -> None:
    model = max_pooling()
    alone = [visattn.explain(model, photo(seed), method="rollout").map.values for seed in (0, 1)]
    assert float((alone[0] - alone[1]).abs().max()) > 0
    batch = list(visattn.explain_batch(model, [photo(0), photo(1)], method="rollout"))
    for one, other in zip(alone, batch, strict=True):
        torch.testing.assert_close(one, other.map.values, rtol=1e-4, atol=1e-6)


def test_a_plain_capture_refuses_in_one_line_and_names_what_works() -> None:
    model = max_pooling()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(prepared(model, photo(0)))
    assert recording.reads == ""
    with pytest.raises(OptionError, match=r"depends on their values\. Choose the query: mean, patch:ROW,COL\.$"):
        visattn.methods.rollout(recording)
    with pytest.raises(
        OptionError, match=r"'read' needs the gradient of a score: .*gradients=True\) and recording\.gradients\(score\)\.$"
    ):
        visattn.methods.rollout(recording, query="read")
    visattn.methods.rollout(recording, query="mean")


def test_the_score_decides_what_is_read() -> None:
    model, pixels = max_pooling(), tiny.pixels(2, (64, 64))
    with visattn.capture(model, gradients=True) as recording:
        logits = model(pixels)
    for score in range(2):
        found = recording.gradients(logits[:, score].sum()).reading
        assert found.query == "read"
        assert found.shares is not None
        torch.testing.assert_close(found.shares, shares(model, pixels, score).double().detach(), rtol=1e-4, atol=1e-7)
    whole = recording.read_by(logits).reading.shares
    assert whole is not None
    torch.testing.assert_close(whole, shares(model, pixels).double().detach(), rtol=1e-4, atol=1e-7)


def test_a_study_keeps_the_shares(tmp_path: Path) -> None:
    model = max_pooling()
    visattn.study(model, photo(0)).save(tmp_path / "one.attn")
    view = visattn.load_study(tmp_path / "one.attn").views[0]
    expected = visattn.explain(model, photo(0), method="rollout")
    torch.testing.assert_close(view.explain("rollout").map.values, expected.map.values, rtol=1e-5, atol=1e-7)


def with_shares(values: Tensor, layout: int, source: Path, file: Path) -> None:
    """Write a copy of a study with other shares."""
    with safe_open(source, "pt") as read:
        stated, tensors = read.metadata(), {name: read.get_tensor(name) for name in read.keys()}  # noqa: SIM118 - it is no mapping
    name = next(key for key, text in stated.items() if '"views"' in text)
    facts = json.loads(stated[name])
    shares = facts["views"][0]["shares"]
    tensors[shares["values"]], shares["layout"] = values, layout
    save_file(tensors, file, stated | {name: json.dumps(facts)})


@pytest.mark.parametrize(
    ("values", "layout", "said"),
    [
        (torch.ones(3) / 3, 0, r"shares must be 16 numbers that are not negative, got \(3,\)"),
        (torch.full((16,), -1.0), 0, r"shares must be 16 numbers that are not negative, got \(16,\)"),
        (torch.ones(16) / 16, 7, "a layout must be one of 1, got 7"),
    ],
)
def test_shares_of_a_study_are_checked(values: Tensor, layout: int, said: str, tmp_path: Path) -> None:
    visattn.study(max_pooling(), photo(0)).save(tmp_path / "one.attn")
    with_shares(values, layout, tmp_path / "one.attn", tmp_path / "other.attn")
    with pytest.raises(StudyError, match=said):
        visattn.load_study(tmp_path / "other.attn")


class Mixed(nn.Module):
    """Model that reads its class token and, times a weight, the mean of its patches."""

    def __init__(self) -> None:
        super().__init__()
        vit: Any = tiny.vit()
        self.vit, self.weight, self.head = vit, nn.Parameter(torch.ones(())), nn.Linear(vit.embed_dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.vit.forward_features(x)
        return self.head(tokens[:, 0] + self.weight * tokens[:, 1:].mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("inference", [False, True])
def test_weights_that_change_change_the_query_of_a_known_tape(inference: bool) -> None:
    model = Mixed().eval()

    def reads() -> str:
        with torch.inference_mode(inference), torch.set_grad_enabled(not inference), visattn.capture(model) as recording:
            model(tiny.pixels())
        return recording.reads

    assert [reads() for _ in range(3)] == ["cls+mean"] * 3
    model.weight.data.zero_()
    assert reads() == "cls"
    model.weight.data.fill_(100)
    assert reads() == "mean"
    with torch.no_grad():
        model.weight.fill_(1)
    assert reads() == "cls+mean"
    model.weight = nn.Parameter(torch.zeros(()))
    assert reads() == "cls"


def test_a_head_of_zeros_has_the_query_that_any_other_has() -> None:
    model = Mixed().eval()
    nn.init.zeros_(model.head.weight)
    with visattn.capture(model, gradients=True) as recording:
        logits = model(tiny.pixels())
    assert recording.reads == "cls+mean"
    assert recording.gradients(logits[:, 1].sum()).reads == "cls+mean"


def test_forward_passes_that_read_other_tokens_are_told_apart() -> None:
    model = Mixed().eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(tiny.pixels())
        model.weight.zero_()
        model(tiny.pixels())
    assert [recording.select(forward=number).reads for number in range(2)] == ["cls+mean", "cls"]
    assert (recording.reads, recording.reading.reason) == ("", "it differs between forward passes")


class Answer(nn.Module):
    """Model with a readout of its own."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        vit: Any = tiny.vit()
        self.vit, self.read, self.head = vit, read, nn.Linear(vit.embed_dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self, self.vit.forward_features(x)))  # type: ignore[no-any-return]


def pooled_beside_cls(model: Any, tokens: Tensor) -> Tensor:
    asking, given = model.vit.cls_token.expand(len(tokens), -1, -1)[:, None], tokens[:, None]
    return tokens[:, 0] + nn.functional.scaled_dot_product_attention(asking, given, given)[:, 0, 0]


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda _, t: t[:, 0].detach(), "it depends on no token behind the last attention"),
        (lambda _, t: t, "the model's output holds each token apart"),
        (lambda _, t: t[:, 1:].amax(1), "which tokens the output is computed from depends on their values"),
        (pooled_beside_cls, "the tokens that this model's output is computed from could not be traced"),
    ],
)
def test_no_query_is_stated_without_a_proof(read: Callable[[Any, Tensor], Tensor], reason: str) -> None:
    with torch.no_grad(), visattn.capture(model := Answer(read).eval()) as recording:
        model(tiny.pixels())
    assert recording.reads == ""
    with pytest.raises(OptionError, match=f"the query is not known: {reason}. Choose the query: cls, mean, patch:ROW,COL"):
        visattn.methods.attention(recording)


def test_shares_of_the_last_tokens_are_no_query_of_other_ones() -> None:
    torch.manual_seed(0)
    small = {"img_size": 64, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4, "num_classes": 4}
    model: Any = timm.create_model("swin_tiny_patch4_window7_224", **small).eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(tiny.pixels(1, (64, 64)))
    last = visattn.methods.attention(recording, query="read", fusion="mean")
    torch.testing.assert_close(last.values, visattn.methods.attention(recording, query="mean", fusion="mean").values)
    with pytest.raises(OptionError, match="'read' is known for the tokens behind the last attention only"):
        visattn.methods.attention(recording, layer=0, query="read")


class Branches(nn.Module):
    """Two transformers with patches of two sizes; one is read by its class token, the other by its mean."""

    def __init__(self) -> None:
        super().__init__()
        small = {"img_size": 64, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 0}
        coarse, fine = (timm.create_model("vit_tiny_patch16_224", patch_size=size, **small) for size in (16, 8))
        self.coarse, self.fine, self.head = coarse, fine, nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.coarse.forward_features(x), self.fine.forward_features(x)
        return self.head(torch.cat([one[:, 0], other[:, 1:].mean(1)], -1))  # type: ignore[no-any-return]


def test_branches_that_are_read_in_two_ways_have_no_query() -> None:
    with torch.no_grad(), visattn.capture(model := Branches().eval()) as recording:
        model(tiny.pixels(1, (64, 64)))
    with pytest.raises(OptionError, match="the query is not known: the output is computed from several sets of tokens"):
        visattn.methods.attention(recording)
