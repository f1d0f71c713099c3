"""Attention of timm written out, and a run under capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import visattn
from visattn.records import Recording


def run(model: nn.Module, x: Tensor, **options: Any) -> tuple[Any, Recording]:
    """Output and recording of one forward."""
    with torch.no_grad(), visattn.capture(model, **options) as recording:
        out = model(x)
    return out, recording


def write_out(model: nn.Module) -> None:
    """Put a model of timm on its eager branch."""
    attentions: list[Any] = [module for module in model.modules() if hasattr(module, "fused_attn")]
    for module in attentions:
        module.fused_attn = False
