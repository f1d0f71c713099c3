"""Vision transformer whose attention is an arbitrary function of query, key and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import tiny
from visattn.core.operators import SoftmaxOperator
from visattn.core.records import AttentionRecord

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
LAYERS = ["blocks.0.attn", "blocks.1.attn"]


class Attention(nn.Module):
    """Attention with `heads` query heads and `groups` heads for keys and values."""

    def __init__(self, attend: Attend, heads: int, groups: int) -> None:
        super().__init__()
        self.attend, self.heads, self.groups = attend, heads, groups
        self.to_q, self.to_kv, self.proj = nn.Linear(32, 32), nn.Linear(32, 64 * groups // heads), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.to_kv(x).unflatten(-1, (2, self.groups, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out: Tensor = self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, attend: Attend, heads: int, groups: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(32), Attention(attend, heads, groups)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attn(self.norm(x))
        return out


class ViT(nn.Module):
    """Vision transformer with a class token, 16-pixel patches, two blocks and a linear head."""

    def __init__(self, attend: Attend, heads: int, groups: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, tiny.PATCH, tiny.PATCH)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 32))
        self.blocks = nn.Sequential(*(Block(attend, heads, groups) for _ in range(2)))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], 1)
        out: Tensor = self.head(self.blocks(tokens)[:, 0])
        return out


def vit(attend: Attend = F.scaled_dot_product_attention, *, heads: int = 2, groups: int | None = None, seed: int = 0) -> ViT:
    """Build the model in evaluation mode, with attention far from uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ViT(attend, heads, groups or heads)
        with torch.no_grad():
            for i in range(2):
                model.get_parameter(f"blocks.{i}.attn.to_q.weight").mul_(8)
    return model.eval()


def mixture(record: AttentionRecord) -> Tensor:
    """Compute `A @ V` in float64, `(B, heads, Q, d)`."""
    assert record.value is not None
    operator: Any = record.operator
    assert isinstance(operator, SoftmaxOperator)
    return operator.to(torch.float64).dense() @ record.value.double()
