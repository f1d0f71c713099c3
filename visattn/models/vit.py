"""Vision transformer with explicit attention: patches, prefix tokens and blocks.

Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929; LayerScale after Touvron et al., arXiv:2103.17239; register tokens
after Darcet et al., arXiv:2309.16588. Parameter names are timm's, so its checkpoints load with `load_state_dict`. Differs from timm: the
attention weights are always computed and returned, without a fused kernel, and the input size is fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class VisionTransformer(nn.Module):
    """Vision transformer: image `(B, 3, H, W)` to tokens `(B, N, dim)` and the attention weights of every layer."""

    def __init__(
        self,
        img_size: tuple[int, int] = (224, 224),
        patch_size: int = 16,
        *,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        num_registers: int = 0,
        class_token: bool = True,
    ) -> None:
        """Build with timm's initialization.

        Args:
            img_size: Size `(height, width)` of the images in pixels, a multiple of `patch_size`.
            patch_size: Side of a patch in pixels.
            embed_dim: Width of a token.
            depth: Number of blocks.
            num_heads: Number of attention heads, a divisor of `embed_dim`.
            mlp_ratio: Ratio of the hidden width of a block's MLP to `embed_dim`.
            num_registers: Number of register tokens, between the class token and the patches.
            class_token: Whether to use a class token.
        """
        super().__init__()
        self.grid = img_size[0] // patch_size, img_size[1] // patch_size
        prefix = int(class_token) + num_registers
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, embed_dim, patch_size, patch_size)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.randn(1, num_registers, embed_dim) * 1e-6) if num_registers else None
        self.pos_embed = nn.Parameter(torch.randn(1, prefix + self.grid[0] * self.grid[1], embed_dim) * 0.02)
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, mlp_ratio) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)

    def forward(self, image: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the tokens after the last norm, and the attention weights of each layer `(B, heads, N, N)`, first layer first."""
        x = self.patch_embed["proj"](image).flatten(2).transpose(1, 2)  # (B, Gh * Gw, dim)
        prefix = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        x = torch.cat([*prefix, x], dim=1) + self.pos_embed  # (B, N, dim)
        weights = []
        for block in self.blocks:
            x, attention = block(x)
            weights.append(attention)
        return self.norm(x), weights


class Block(nn.Module):
    """Transformer block: `x + attention(norm(x))`, then `x + mlp(norm(x))`, each branch with a LayerScale."""

    def __init__(self, embed_dim: int, num_heads: int, mlp_ratio: float) -> None:
        """Build the block."""
        super().__init__()
        self.norm1 = nn.LayerNorm(embed_dim, eps=1e-6)
        self.attn = Attention(embed_dim, num_heads)
        self.ls1 = LayerScale(embed_dim)
        self.norm2 = nn.LayerNorm(embed_dim, eps=1e-6)
        self.mlp = MLP(embed_dim, int(embed_dim * mlp_ratio))
        self.ls2 = LayerScale(embed_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new tokens `(B, N, dim)` and the attention weights `(B, heads, N, N)`."""
        out, weights = self.attn(self.norm1(x))
        x = x + self.ls1(out)
        return x + self.ls2(self.mlp(self.norm2(x))), weights


class Attention(nn.Module):
    """Multi-head self-attention, `softmax(Q K^T / sqrt(d)) V`, without a fused kernel."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        """Build the projections."""
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output tokens `(B, N, dim)` and the attention weights `(B, heads, N, N)`."""
        batch, tokens, embed_dim = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, embed_dim // self.num_heads)  # (B, N, 3, heads, d)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, N, d)
        scores = query @ key.transpose(-2, -1) * (embed_dim // self.num_heads) ** -0.5  # (B, heads, N, N)
        weights = scores.softmax(dim=-1)  # rows sum to 1
        gathered = (weights @ value).transpose(1, 2).reshape(batch, tokens, embed_dim)  # (B, heads, N, d) -> (B, N, dim)
        return self.proj(gathered), weights


class LayerScale(nn.Module):
    """Learned factor per channel."""

    def __init__(self, embed_dim: int) -> None:
        """Build the factors; they start at 1, so without a checkpoint the layer is a no-op."""
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(embed_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Scale each channel."""
        return x * self.gamma


class MLP(nn.Module):
    """Feed-forward network of two linear layers with a GELU between them."""

    def __init__(self, embed_dim: int, hidden: int) -> None:
        """Build both layers."""
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, hidden)
        self.fc2 = nn.Linear(hidden, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to each token."""
        hidden = nn.functional.gelu(self.fc1(x))  # (B, N, hidden)
        out: Tensor = self.fc2(hidden)
        return out
