"""DINOv2 in the code of transformers, with the weights of timm's model."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn

_PARTS = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}
_EARLIER = {  # names of earlier versions, by those of today
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
}
_IN_A_BLOCK = {
    "norm1": "norm1",
    "attn.proj": "attention.o_proj",
    "ls1.gamma": "layer_scale1.lambda1",
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "ls2.gamma": "layer_scale2.lambda1",
}


def twin(model: nn.Module) -> Any:  # noqa: ANN401 - a model of transformers
    """Return the model of transformers with the weights of timm's DINOv2 ViT-S/14.

    Raises:
        ValueError: If a weight has no place.
    """
    config: Any = transformers.Dinov2Config(hidden_size=384, num_attention_heads=6, patch_size=14, image_size=518)
    made: Any = transformers.Dinov2Model(config)
    made.eval()
    weights = _renamed(model.state_dict())
    if "encoder.layer.0.attention.q_proj.weight" not in made.state_dict():
        for today, earlier in _EARLIER.items():
            weights = {name.replace(today, earlier): value for name, value in weights.items()}
    missing, unexpected = made.load_state_dict(weights, strict=False)
    if missing != ["embeddings.mask_token"] or unexpected:
        raise ValueError(f"weights do not fit: {missing}, {unexpected}")
    return made


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for name, value in weights.items():
        if not name.startswith("blocks."):
            stem = next(part for part in _PARTS if name.startswith(part))
            made[name.replace(stem, _PARTS[stem])] = value
            continue
        _, block, rest = name.split(".", 2)
        if rest.startswith("attn.qkv"):
            for part, chunk in zip(("q_proj", "k_proj", "v_proj"), value.chunk(3), strict=True):
                made[f"encoder.layer.{block}.attention.{part}.{rest.rpartition('.')[2]}"] = chunk
            continue
        stem = next(part for part in _IN_A_BLOCK if rest.startswith(part))
        made[f"encoder.layer.{block}.{rest.replace(stem, _IN_A_BLOCK[stem])}"] = value
    return made
