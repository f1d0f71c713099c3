"""Models of diffusers, one of each kind, at a tiny size, with latents that are wider than high."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor, nn

LIBRARY, VERSION = "diffusers", diffusers.__version__
BATCH = 2
WORDS = 7
HEIGHT, WIDTH = 16, 24
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
_UNET: dict[str, Any] = {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": (HEIGHT, WIDTH)}
LEFT_OUT: dict[str, str] = {}
# kind, and the settings of a tiny model
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "AutoencoderKL": (
        "autoencoder",
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "latent_channels": 4,
        },
    ),
    "DiTTransformer2DModel": (
        "transformer",
        _HEADS | {"in_channels": 4, "out_channels": 8, "sample_size": HEIGHT, "patch_size": 2, "num_embeds_ada_norm": 8},
    ),
    "PixArtTransformer2DModel": (
        "transformer",
        _HEADS
        | {
            "in_channels": 4,
            "out_channels": 8,
            "sample_size": HEIGHT,
            "patch_size": 2,
            "num_embeds_ada_norm": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
            "use_additional_conditions": False,
        },
    ),
    "SD3Transformer2DModel": (
        "transformer, joint attention",
        _HEADS
        | {
            "in_channels": 4,
            "out_channels": 4,
            "sample_size": HEIGHT,
            "patch_size": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 32,
        },
    ),
    "UNet2DConditionModel": (
        "UNet with words",
        _UNET
        | {
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 8,
        },
    ),
    "UNet2DModel": (
        "UNet",
        _UNET
        | {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "in_channels": 4,
            "out_channels": 4,
            "attention_head_dim": 8,
        },
    ),
}


def names() -> dict[str, str]:
    """Return the models, with the kind of each."""
    return {name: kind for name, (kind, _) in MODELS.items()}


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a tiny model in evaluation mode, and its inputs."""
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**MODELS[name][1]).eval()
    for parameter in model.parameters():
        if not bool(parameter.any()):  # what begins at zero would hide the rest
            nn.init.normal_(parameter, std=0.02)
    return model, _inputs(name)


def _inputs(name: str) -> dict[str, Any]:
    if name == "AutoencoderKL":
        return {"sample": _random(BATCH, 3, 2 * HEIGHT, 2 * WIDTH)}
    width = HEIGHT if name == "DiTTransformer2DModel" else WIDTH  # which reads its grid from the number of tokens
    latents, step, words = _random(BATCH, 4, HEIGHT, width), torch.tensor([5, 3]), _random(BATCH, WORDS, 16, seed=2)
    known: dict[str, dict[str, Any]] = {
        "DiTTransformer2DModel": {"hidden_states": latents, "timestep": step, "class_labels": torch.tensor([1, 4])},
        "PixArtTransformer2DModel": {
            "hidden_states": latents,
            "encoder_hidden_states": words,
            "timestep": step,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        "SD3Transformer2DModel": {
            "hidden_states": latents,
            "encoder_hidden_states": words,
            "pooled_projections": _random(BATCH, 32, seed=3),
            "timestep": step,
        },
        "UNet2DConditionModel": {"sample": latents, "timestep": step, "encoder_hidden_states": words},
        "UNet2DModel": {"sample": latents, "timestep": step},
    }
    return known[name]


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
