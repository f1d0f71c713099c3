"""A vision transformer to read from top to bottom: patches, prefix tokens, blocks, and attention written out.

Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929; LayerScale after Touvron et al., arXiv:2103.17239; register
tokens after Darcet et al., arXiv:2309.16588. Parameter names are timm's, so its checkpoints load (`load_state_dict`). Differs from
timm: the matrix of attention is always computed and returned, no kernel hides it, and the input has the one size it was built for.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class VisionTransformer(nn.Module):
    """Image `(B, 3, H, W)` to tokens `(B, N, dim)` and the attention of every layer."""

    def __init__(
        self,
        img_size: tuple[int, int] = (224, 224),
        patch_size: int = 16,
        *,
        dim: int = 384,
        depth: int = 12,
        heads: int = 6,
        mlp_ratio: float = 4.0,
        registers: int = 0,
        class_token: bool = True,
    ) -> None:
        """Build with timm's initial values.

        Args:
            img_size: `(height, width)` in pixels, whole patches.
            patch_size: Side of a patch in pixels.
            dim: Width of a token.
            depth: Number of blocks.
            heads: Attention heads; they divide `dim`.
            mlp_ratio: Width of the hidden layer of a block, in `dim`.
            registers: Number of register tokens, between class token and patches.
            class_token: Whether there is a class token.
        """
        super().__init__()
        self.grid = img_size[0] // patch_size, img_size[1] // patch_size
        prefix = int(class_token) + registers
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, dim, patch_size, patch_size)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.randn(1, registers, dim) * 1e-6) if registers else None
        self.pos_embed = nn.Parameter(torch.randn(1, prefix + self.grid[0] * self.grid[1], dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads, mlp_ratio) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, image: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Tokens after the last norm, and each layer's attention `(B, heads, N, N)`, first layer first."""
        x = self.patch_embed["proj"](image).flatten(2).transpose(1, 2)  # (B, Gh * Gw, dim)
        prefix = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        x = torch.cat([*prefix, x], dim=1) + self.pos_embed  # (B, N, dim)
        weights = []
        for block in self.blocks:
            x, attention = block(x)
            weights.append(attention)
        return self.norm(x), weights


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`, each branch scaled channel by channel."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float) -> None:
        """Build one block."""
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.ls1 = LayerScale(dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, int(dim * mlp_ratio))
        self.ls2 = LayerScale(dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens `(B, N, dim)` to tokens and attention `(B, heads, N, N)`."""
        out, weights = self.attn(self.norm1(x))
        x = x + self.ls1(out)
        return x + self.ls2(self.mlp(self.norm2(x))), weights


class Attention(nn.Module):
    """`softmax(Q K^T / sqrt(d)) V`, written out."""

    def __init__(self, dim: int, heads: int) -> None:
        """Build the projections."""
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens `(B, N, dim)` to what they gather, and the weights `(B, heads, N, N)` they gather by."""
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, N, d)
        scores = query @ key.transpose(-2, -1) * (dim // self.heads) ** -0.5  # (B, heads, N, N)
        weights = scores.softmax(dim=-1)  # rows sum to 1
        gathered = (weights @ value).transpose(1, 2).reshape(batch, tokens, dim)
        return self.proj(gathered), weights


class LayerScale(nn.Module):
    """One factor a channel."""

    def __init__(self, dim: int) -> None:
        """Start at 1: without a checkpoint it does nothing."""
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Scale."""
        return x * self.gamma


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        """Build both layers."""
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Token by token."""
        hidden = nn.functional.gelu(self.fc1(x))
        out: Tensor = self.fc2(hidden)
        return out
