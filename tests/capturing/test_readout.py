"""The explained query is the one that the model reads, checked with the gradient of its score at the last attention call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import visattn
from tests import tiny
from tests.capturing import own
from visattn.core.methods.queries import weights_of
from visattn.errors import OptionError

SIDE = 64


class LastAttention(TorchFunctionMode):
    """Function mode that keeps the result of the last attention call; it shares no code with a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self._weights = torch.empty(0), set[int]()
        self._kept: list[Tensor] = []

    def __torch_function__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self.out = out
        elif name == "softmax" and out.ndim > 2:
            self._note(out)
        elif args and isinstance(args[0], Tensor) and id(args[0]) in self._weights:
            if name in ("dropout", "to", "view", "contiguous", "type_as"):
                self._note(out)
            elif name in ("matmul", "__matmul__", "bmm"):
                self.out = out
        return out

    def _note(self, tensor: Tensor) -> None:
        self._weights.add(id(tensor))
        self._kept.append(tensor)


def logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[no-any-return]


def read_tokens(model: nn.Module, x: Tensor) -> Tensor:
    """Return for each token behind the last attention call whether the score depends on it, `(N,)`, in the order of the model."""
    last = LastAttention()
    with last:
        logits = logits_of(model(x.clone().requires_grad_()))
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), [last.out])
    return (gradient != 0).flatten(0, -3).any(0).any(-1)


def explained(recording: visattn.Recording, count: int) -> tuple[str, Tensor]:
    """Return the query that `auto` selects, and which of the `count` tokens in the last such layer it uses."""
    record = next(
        record for record in reversed(recording) if len(record.queries) == count or record.operator.query_index is not None
    )
    weights, chosen = weights_of("auto", record.queries, recording.reading, torch.device("cpu"))
    return chosen, weights.flatten() > 0


def awake(model: nn.Module) -> nn.Module:
    """Return the model in evaluation mode, with head and layer scales that are not close to zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "gamma" in name or "lambda" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


VIT: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4, "img_size": SIDE}
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "class token": ("vit_tiny_patch16_224", VIT),
    "mean": ("vit_tiny_patch16_224", VIT | {"global_pool": "avg", "class_token": False}),
    "mean beside a class token": ("vit_tiny_patch16_224", VIT | {"global_pool": "avg"}),
    "mean of all tokens": ("vit_tiny_patch16_224", VIT | {"global_pool": "avg", "pool_include_prefix": True}),
    "maximum": ("vit_tiny_patch16_224", VIT | {"global_pool": "max", "class_token": False}),
    "mean and maximum": ("vit_tiny_patch16_224", VIT | {"global_pool": "avgmax", "class_token": False}),
    "pooled by attention": ("vit_base_patch16_siglip_224", VIT),
    "registers": ("vit_tiny_patch16_224", VIT | {"reg_tokens": 4}),
    "registers, mean": ("vit_tiny_patch16_224", VIT | {"reg_tokens": 4, "global_pool": "avg"}),
    "deit": ("deit_tiny_patch16_224", VIT),
    "deit distilled": ("deit_tiny_distilled_patch16_224", VIT),
    "deit3": ("deit3_small_patch16_224", VIT),
    "beit, mean": ("beit_base_patch16_224", VIT),
    "beit, class token": ("beit_base_patch16_224", VIT | {"global_pool": "token"}),
    "eva, mean": ("eva02_tiny_patch14_224", VIT | {"patch_size": 16}),
    "eva, class token": ("eva02_tiny_patch14_224", VIT | {"patch_size": 16, "global_pool": "token"}),
    "relative positions": ("vit_relpos_small_patch16_224", VIT),
    "dinov3": ("vit_small_patch16_dinov3", VIT),
    "dinov2": ("vit_small_patch14_dinov2", VIT | {"patch_size": 16}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": SIDE, "embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4, "num_classes": 4},
    ),
    "cait": ("cait_xxs24_224", VIT | {"depth_token_only": 1}),
    "convit": ("convit_tiny", VIT | {"local_up_to_layer": 1}),
    "hiera": ("hiera_tiny_224", {"img_size": (SIDE, SIDE), "embed_dim": 16, "stages": (1, 1, 2, 1), "num_classes": 4}),
}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": SIDE,
    "patch_size": 16,
    "num_labels": 4,
}
STAGES: dict[str, Any] = {"image_size": SIDE, "num_labels": 4}
SWIN: dict[str, Any] = STAGES | {"patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
HF: dict[str, Callable[[], nn.Module]] = {
    "ViT": lambda: hf.ViTForImageClassification(hf.ViTConfig(**SMALL)),
    "ViT eager": lambda: eager(hf.ViTForImageClassification, hf.ViTConfig(**SMALL)),
    "DeiT": lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**SMALL)),
    "DeiT with teacher": lambda: hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**SMALL)),
    "BEiT, mean": lambda: hf.BeitForImageClassification(hf.BeitConfig(**SMALL, use_mean_pooling=True)),
    "BEiT, class token": lambda: hf.BeitForImageClassification(hf.BeitConfig(**SMALL, use_mean_pooling=False)),
    "BEiT eager, mean": lambda: eager(hf.BeitForImageClassification, hf.BeitConfig(**SMALL)),
    "Data2Vec, mean": lambda: hf.Data2VecVisionForImageClassification(hf.Data2VecVisionConfig(**SMALL)),
    "Data2Vec, class token": lambda: hf.Data2VecVisionForImageClassification(
        hf.Data2VecVisionConfig(**SMALL, use_mean_pooling=False)
    ),
    "DINOv2": lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**SMALL)),
    "DINOv2 with registers": lambda: hf.Dinov2WithRegistersForImageClassification(hf.Dinov2WithRegistersConfig(**SMALL)),
    "ViT-MSN": lambda: hf.ViTMSNForImageClassification(hf.ViTMSNConfig(**SMALL)),
    "I-JEPA": lambda: hf.IJepaForImageClassification(hf.IJepaConfig(**SMALL)),
    "CLIP": lambda: hf.CLIPForImageClassification(hf.CLIPConfig(vision_config=SMALL, num_labels=4)),
    "SigLIP": lambda: hf.SiglipForImageClassification(hf.SiglipConfig(vision_config=SMALL, num_labels=4)),
    "Swin": lambda: hf.SwinForImageClassification(hf.SwinConfig(**SWIN)),
    "Swin v2": lambda: hf.Swinv2ForImageClassification(hf.Swinv2Config(**SWIN)),
    "Donut's Swin": lambda: hf.DonutSwinForImageClassification(hf.DonutSwinConfig(**SWIN)),
    "Hiera": lambda: hf.HieraForImageClassification(
        hf.HieraConfig(image_size=[SIDE, SIDE], embed_dim=16, depths=[1, 1, 1, 1], num_labels=4)
    ),
    "PVT v2": lambda: hf.PvtV2ForImageClassification(
        hf.PvtV2Config(
            **STAGES,
            hidden_sizes=[16, 16, 32, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 1, 2, 2],
            mlp_ratios=[2, 2, 2, 2],
        )
    ),
    "SegFormer": lambda: hf.SegformerForImageClassification(
        hf.SegformerConfig(**STAGES, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2])
    ),
    "MobileViT": lambda: hf.MobileViTForImageClassification(hf.MobileViTConfig(**STAGES)),
}


def eager(kind: Any, config: Any) -> nn.Module:
    return kind._from_config(config, attn_implementation="eager")  # type: ignore[no-any-return]


def from_timm(name: str) -> Callable[[], nn.Module]:
    kind, options = TIMM[name]
    return lambda: timm.create_model(kind, **options)  # type: ignore[no-any-return]


MODELS = {f"timm: {name}": from_timm(name) for name in TIMM} | {f"transformers: {name}": build for name, build in HF.items()}
MEASURED = {
    "timm: maximum",
    "timm: mean and maximum",
    "transformers: PVT v2",  # convolutions behind the last attention
    "transformers: SegFormer",
    "transformers: MobileViT",
}


def test_at_least_20_models_of_each_library_are_tested() -> None:
    assert len(TIMM) >= 20
    assert len(HF) >= 20


@pytest.mark.parametrize("name", list(MODELS))
def test_the_explained_query_is_the_token_that_the_output_depends_on(name: str) -> None:
    torch.manual_seed(0)
    model, x = awake(MODELS[name]()), torch.randn(1, 3, SIDE, SIDE)
    read = read_tokens(model, x)
    with visattn.capture(model, gradients=name in MEASURED) as recording:
        logits = logits_of(model(x))
    if name in MEASURED:  # only a gradient tells which tokens
        assert recording.reads == ""
        recording = recording.gradients(logits[:, 1].sum())
    chosen, tokens = explained(recording, len(read))
    if recording[-1].operator.query_index is not None:  # windows: all tokens are read, in any order
        assert bool(read.all()) == bool(tokens.all())
    else:
        assert tokens.tolist() == read.tolist(), chosen


def test_relevance_of_a_beit_with_mean_pooling_uses_the_mean_query() -> None:
    torch.manual_seed(0)
    model = awake(HF["BEiT, mean"]())
    with visattn.capture(model, gradients=True) as recording:
        logits = model(pixel_values=torch.randn(1, 3, SIDE, SIDE)).logits
    graded = recording.gradients(logits[0, 1])
    found, expected = visattn.methods.relevance(graded), visattn.methods.relevance(graded, query="mean")
    assert found.provenance.parameters["query"] == "mean"
    assert float(torch.corrcoef(torch.stack([found.values.flatten(), expected.values.flatten()]))[0, 1]) == pytest.approx(1)


class Read(nn.Module):
    """Custom model with a given readout function."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.vit, self.read = own.vit(), read

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.vit.patches(x).flatten(2).mT
        tokens = self.vit.blocks(torch.cat([self.vit.cls_token.expand(len(x), -1, -1), tokens], 1))
        return self.read(tokens)


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "class token": (lambda t: t[:, 0], "cls"),
    "class token by select": (lambda t: t.select(1, 0), "cls"),
    "class token by split": (lambda t: t.split([1, 6], 1)[0].squeeze(1), "cls"),
    "mean of the patches": (lambda t: t[:, 1:].mean(1), "mean"),
    "sum of the patches": (lambda t: t[:, 1:].sum(1), "mean"),
    "mean of all": (lambda t: t.mean(1), "all"),
    "class token and mean": (lambda t: t[:, 0] + t[:, 1:].mean(1), "cls+mean"),
    "class token beside the mean": (lambda t: torch.cat([t[:, 0], t[:, 1:].mean(1)], -1), "cls+mean"),
    "adaptive pooling": (lambda t: F.adaptive_avg_pool1d(t[:, 1:].mT, 1).flatten(1), "mean"),
    "one patch": (lambda t: t[:, 3], "read"),
    "sorted": (lambda t: t.sort(1).values[:, 0], ""),
    "all tokens": (lambda t: t, ""),
    "first patches": (lambda t: t[:, 1:3].mean(1), "read"),
}


@pytest.mark.parametrize("name", list(WAYS))
def test_readout_of_a_custom_model_is_found_or_must_be_chosen(name: str) -> None:
    read, expected = WAYS[name]
    model = Read(read).eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(tiny.pixels())
    assert recording.reads == expected
    if expected:
        assert visattn.methods.rollout(recording).provenance.parameters["query"] == expected
    else:
        with pytest.raises(OptionError, match=r"the query is not known: .*\. Choose the query: cls, mean, patch:ROW,COL\."):
            visattn.methods.rollout(recording)


def test_the_readout_is_found_from_the_gradient_of_a_score() -> None:
    model = Read(lambda t: t).eval()
    with visattn.capture(model, gradients=True) as recording:
        out = model(tiny.pixels())
    for score, expected in ((out[:, 0].sum(), "cls"), (out[:, 1:].sum(), "mean"), (out[:, 1:].square().sum(), "read")):
        assert visattn.methods.relevance(recording.gradients(score)).provenance.parameters["query"] == expected
