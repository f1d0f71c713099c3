"""Residual stream of a block, and the output weight of its attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import visattn
from tests import tiny
from visattn.core import methods

_SIZES: dict[str, Any] = {"img_size": tiny.INPUT, "num_classes": 4}
_VIT = _SIZES | {"embed_dim": 32, "depth": 2, "num_heads": 2}
BLOCKS: dict[str, Callable[[], Any]] = {
    "vit": tiny.vit,
    "vit with layer scale": lambda: tiny.vit(init_values=0.1),
    "dinov2": lambda: timm.create_model("vit_small_patch14_dinov2", **_VIT | {"img_size": (28, 42)}),
    "beit": lambda: timm.create_model("beit_base_patch16_224", **_VIT),
    "eva": lambda: timm.create_model("eva02_tiny_patch14_224", **_VIT, patch_size=16),
    "relpos": lambda: timm.create_model("vit_relpos_small_patch16_224", **_VIT),
    "cait": lambda: timm.create_model("cait_xxs24_224", **_VIT),
}


def randomized(model: nn.Module) -> nn.Module:
    """Draw random layer scales; at their initial 1e-5 a missing scale would not be noticed."""
    for name, parameter in model.named_parameters():
        if "gamma" in name:
            nn.init.uniform_(parameter, 0.2, 2)
    return model.double().eval()


@pytest.mark.parametrize("name", list(BLOCKS))
@torch.no_grad()
def test_residual_stream_plus_projected_heads_equals_the_input_of_the_mlp(name: str) -> None:
    model: Any = randomized(BLOCKS[name]())
    seen: list[Tensor] = []
    for block in model.blocks:
        block.norm2.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    size = (28, 42) if name == "dinov2" else tiny.INPUT
    with visattn.capture(model, values=True) as recording:
        model(tiny.pixels(2, size).double())
    records = [record for record in recording if record.kind == "self"]
    assert len(records) == len(model.blocks) == 2
    for number, (record, behind) in enumerate(zip(records, seen, strict=True)):
        assert record.residual is not None
        assert record.output_weight is not None
        assert record.value is not None
        heads = record.operator.to(torch.float64) @ record.value.double()
        block = model.blocks[number]
        scale = getattr(block, "gamma_1", None)
        scale = (
            scale
            if scale is not None
            else getattr(block.ls1, "gamma", torch.ones(()))
            if hasattr(block, "ls1")
            else torch.ones(())
        )
        expected = record.residual + heads.transpose(1, 2).flatten(2) @ record.output_weight.T + block.attn.proj.bias * scale
        torch.testing.assert_close(expected, behind, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_block_with_a_norm_after_its_attention_has_no_residual_stream() -> None:
    model = timm.create_model("vit_relpos_base_patch32_plus_rpn_256", **_VIT | {"img_size": (64, 96)}).eval()
    with visattn.capture(model, values=True) as recording:
        model(tiny.pixels(1, (64, 96)))
    assert all(record.residual is None for record in recording)
    with pytest.raises(visattn.VisattnError, match="is not known"):
        methods.rollout(recording, residual="measured")
