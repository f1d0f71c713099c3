"""Helpers for captures: run a model, and switch timm attention to its unfused branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import visattn
from visattn.core.records import Recording


def run(model: nn.Module, x: Tensor, **options: Any) -> tuple[Any, Recording]:
    """Run one forward pass under capture; return output and recording."""
    with torch.no_grad(), visattn.capture(model, **options) as recording:
        out = model(x)
    return out, recording


def write_out(model: nn.Module) -> None:
    """Switch a timm model to its unfused attention."""
    attentions: list[Any] = [module for module in model.modules() if hasattr(module, "fused_attn")]
    for module in attentions:
        module.fused_attn = False
