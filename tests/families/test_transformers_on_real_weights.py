"""DINOv2 with its trained weights in the code of transformers: maps equal those of the eager implementation and those of timm's code."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

import visattn
from tests.conftest import Figures, Seen

PARTS = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}
IN_A_BLOCK = {
    "norm1": "norm1",
    "attn.proj": "attention.o_proj",
    "ls1.gamma": "layer_scale1.lambda1",
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "ls2.gamma": "layer_scale2.lambda1",
}


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of timm's DINOv2 under the names of transformers."""
    made: dict[str, Tensor] = {}
    for name, value in weights.items():
        if not name.startswith("blocks."):
            stem = next(part for part in PARTS if name.startswith(part))
            made[name.replace(stem, PARTS[stem])] = value
            continue
        _, block, rest = name.split(".", 2)
        if rest.startswith("attn.qkv"):
            for part, chunk in zip(("q_proj", "k_proj", "v_proj"), value.chunk(3), strict=True):
                made[f"encoder.layer.{block}.attention.{part}.{rest.rpartition('.')[2]}"] = chunk
            continue
        stem = next(part for part in IN_A_BLOCK if rest.startswith(part))
        made[f"encoder.layer.{block}.{rest.replace(stem, IN_A_BLOCK[stem])}"] = value
    return made


@pytest.fixture(scope="module")
def twin(dinov2: nn.Module) -> nn.Module:
    config = transformers.Dinov2Config(hidden_size=384, num_attention_heads=6, patch_size=14, image_size=518)
    model = transformers.Dinov2Model(config).eval()  # type: ignore[no-untyped-call]
    missing, unexpected = model.load_state_dict(renamed(dinov2.state_dict()), strict=False)
    assert missing == ["embeddings.mask_token"]
    assert not unexpected
    return model  # type: ignore[no-any-return]


def test_maps_equal_the_eager_implementation_and_those_of_timms_code(twin: nn.Module, seen: Seen, figures: Figures) -> None:
    prepared, of_timm = seen("astronaut")
    with torch.no_grad(), visattn.capture(twin) as recording:
        twin(prepared.pixels)
    assert [record.keys for record in recording] == [record.keys for record in of_timm]
    twin.set_attn_implementation("eager")  # type: ignore[operator]
    with torch.no_grad():
        eager = twin(prepared.pixels, output_attentions=True).attentions
    twin.set_attn_implementation("sdpa")  # type: ignore[operator]
    for record, other, theirs in zip(recording, of_timm, eager, strict=True):
        rows = torch.tensor([0, 100, 700])
        mine = record.operator.rows(rows)
        assert torch.allclose(mine, theirs[:, :, rows], atol=1e-4)
        assert torch.allclose(mine, other.operator.rows(rows), atol=1e-4)
    worst = max(
        float((record.operator.rows(rows) - theirs[:, :, rows]).abs().max())
        for record, theirs in zip(recording, eager, strict=True)
    )
    figures("DINOv2 in transformers: weights against its eager implementation", worst, "<= 1e-4")
