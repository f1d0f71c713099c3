"""Classifiers of timm and transformers as cases of the judge, small and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
import transformers as hf
from torch import Tensor, nn

from tests.capturing.heads.judge import Verdict, verdict
from tests.capturing.heads.truth import Case

SIDE = 64
COARSE = 0.3  # maps of `read` are compared coarsely: the library may measure shares before the last block's second branch


@dataclass(frozen=True)
class Real:
    """A classifier.

    Attributes:
        build: Function that builds it.
        read: Name of the module whose result is pooled.
        prefix: Number of prefix tokens in it.
        patches: Number of patches in it.
        latents: Name of the module whose result are the latent tokens of an attention pooling.
        scores: Function from the output to the scores.
        pooled: Whether it pools; if not, the scores are those of the first token.
    """

    build: Callable[[], nn.Module]
    read: str
    prefix: int
    patches: int = 16
    latents: str = ""
    scores: Callable[[Any], Tensor] = lambda output: output if isinstance(output, Tensor) else output.logits
    pooled: bool = True


def _awake(model: nn.Module) -> nn.Module:
    """Return the model in evaluation mode and double precision, without weights and layer scales that are close to zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "gamma" in name or "lambda" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model.double().eval()


VIT: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4, "img_size": SIDE}


def _timm(prefix: int, name: str = "vit_tiny_patch16_224", read: str = "norm", latents: str = "", **options: Any) -> Real:
    scores: Any = {"scores": lambda output: output[:, 0], "pooled": False} if options.get("global_pool") == "" else {}
    return Real(lambda: timm.create_model(name, **VIT | options), read, prefix, latents=latents, **scores)


_PARTS: dict[str, dict[str, str]] = {"map": {"latents": "attn_pool.proj"}, "prr": {"read": "attn_pool.post_norm"}}
POOLS = ("token", "avg", "avgmax", "max", "map", "prr", "")
EVA: dict[str, Any] = {"name": "eva02_tiny_patch14_224", "patch_size": 16}
BEIT: dict[str, Any] = {"name": "beit_base_patch16_224"}
TIMM: dict[str, Real] = {
    **{f"timm ViT, {pool or 'no pooling'}": _timm(1, global_pool=pool, **_PARTS.get(pool, {})) for pool in POOLS},
    **{
        f"timm ViT without class token, {pool or 'no pooling'}": _timm(
            0, global_pool=pool, class_token=False, **_PARTS.get(pool, {})
        )
        for pool in POOLS[1:]
    },
    **{
        f"timm ViT with registers, {pool}": _timm(5, global_pool=pool, reg_tokens=4, **_PARTS.get(pool, {}))
        for pool in POOLS[:-1]
    },
    **{
        f"timm ViT, {pool} of all tokens": _timm(1, global_pool=pool, pool_include_prefix=True, **_PARTS.get(pool, {}))
        for pool in ("avg", "avgmax", "max", "map")
    },
    "timm ViT, avg behind the norm": _timm(1, global_pool="avg", fc_norm=False),
    "timm SigLIP": _timm(0, name="vit_base_patch16_siglip_224", latents="attn_pool.proj"),
    "timm DeiT": _timm(1, name="deit_tiny_patch16_224"),
    "timm DeiT distilled": _timm(2, name="deit_tiny_distilled_patch16_224"),
    **{f"timm EVA, {pool}": _timm(1, global_pool=pool, **EVA) for pool in ("token", "avg", "avgmax", "max")},
    **{f"timm BEiT, {pool}": _timm(1, global_pool=pool, **BEIT) for pool in ("token", "avg")},
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
SWIN: dict[str, Any] = {
    "image_size": SIDE,
    "num_labels": 4,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "window_size": 4,
}
STAGES: dict[str, Any] = {
    "image_size": SIDE,
    "num_labels": 4,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 1, 2, 2],
}
FOUR: dict[str, Any] = {"num_labels": 4}
HF: dict[str, Real] = {
    "ViT": Real(lambda: hf.ViTForImageClassification(hf.ViTConfig(**SMALL)), "vit.layernorm", 1),
    "DeiT": Real(lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**SMALL)), "deit.layernorm", 2),
    "DeiT with teacher": Real(lambda: hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**SMALL)), "deit.layernorm", 2),
    "BEiT, mean": Real(lambda: hf.BeitForImageClassification(hf.BeitConfig(**SMALL, use_mean_pooling=True)), "beit.layernorm", 1),
    "BEiT, class token": Real(
        lambda: hf.BeitForImageClassification(hf.BeitConfig(**SMALL, use_mean_pooling=False)), "beit.layernorm", 1
    ),
    "Data2Vec": Real(
        lambda: hf.Data2VecVisionForImageClassification(hf.Data2VecVisionConfig(**SMALL)), "data2vec_vision.layernorm", 1
    ),
    "DINOv2": Real(lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**SMALL)), "dinov2.layernorm", 1),
    "DINOv2 with registers": Real(
        lambda: hf.Dinov2WithRegistersForImageClassification(hf.Dinov2WithRegistersConfig(**SMALL)),
        "dinov2_with_registers.layernorm",
        5,
    ),
    "ViT-MSN": Real(lambda: hf.ViTMSNForImageClassification(hf.ViTMSNConfig(**SMALL)), "vit.layernorm", 1),
    "I-JEPA": Real(lambda: hf.IJepaForImageClassification(hf.IJepaConfig(**SMALL)), "ijepa.layernorm", 0),
    "CLIP": Real(lambda: hf.CLIPForImageClassification(hf.CLIPConfig(vision_config=SMALL, **FOUR)), "vision_model.encoder", 1),
    "SigLIP": Real(
        lambda: hf.SiglipForImageClassification(hf.SiglipConfig(vision_config=SMALL, **FOUR)),
        "vision_model.post_layernorm",
        0,
    ),
    "Swin": Real(lambda: hf.SwinForImageClassification(hf.SwinConfig(**SWIN)), "swin.layernorm", 0, 64),
    "Swin v2": Real(lambda: hf.Swinv2ForImageClassification(hf.Swinv2Config(**SWIN)), "swinv2.layernorm", 0, 64),
    "PVT": Real(
        lambda: hf.PvtForImageClassification(hf.PvtConfig(**STAGES, mlp_ratios=[2, 2, 2, 2])), "pvt.encoder.layer_norm", 1, 4
    ),
}
GROUPS = {"timm": TIMM, "transformers": HF}
MODELS = TIMM | HF


def case(real: Real) -> Case:
    """Return a classifier as a case, with two images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = _awake(real.build()), torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64)
    latents = model.get_submodule(real.latents) if real.latents else None
    order = range(real.prefix + real.patches)
    return Case(
        model, [(x,)], model.get_submodule(real.read), order, real.prefix, None, latents, real.scores, COARSE, real.pooled
    )


def judge(name: str) -> Verdict:
    """Judge a classifier by its name."""
    return verdict(case(MODELS[name]))
