"""Talking-heads attention."""

from __future__ import annotations

from torch import Tensor, nn

from visattn.nn.shape_checks import check_tokens
from visattn.nn.tokens.multihead import check_heads, join, split_qkv


class TalkingHeadsAttention(nn.Module):
    """Talking-heads attention: linear layers mix the scores across heads before the softmax, and the weights after it.

    `A = P_w softmax(P_l (Q K^T / sqrt(d)))`, where `P_l` and `P_w` act across heads; then `A V`, heads concatenated and projected. No fused
    kernel supports this, so the weights are always materialized. Parameter names and shapes are those of timm's `TalkingHeadAttn`.

    Args:
        embed_dim: Width of a token, C.
        num_heads: Number of heads, a divisor of C.
        qkv_bias: Whether the query, key and value projections have a bias.

    Shape:
        `(B, N, C)` to `(B, N, C)`. With `need_weights=True` also the weights after `P_w`, `(B, heads, N, N)`, which multiply the values.
        They can be negative, and their rows need not sum to 1.

    Raises:
        OptionError: If `num_heads` does not divide `embed_dim`.
        ShapeError: In the forward pass, if the input is not `(B, N, C)`.

    Reference:
        Shazeer et al., "Talking-Heads Attention", 2020, arXiv:2003.02436. Differs: as in CaiT, both mixing layers have a bias and as many
        output heads as input heads.
    """

    def __init__(self, embed_dim: int, num_heads: int = 8, *, qkv_bias: bool = False) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.proj_l = nn.Linear(num_heads, num_heads)
        self.proj_w = nn.Linear(num_heads, num_heads)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each token to all tokens."""
        check_tokens(self, x, self.embed_dim)
        query, key, value = split_qkv(self.qkv(x), self.num_heads)
        scores = (query * query.shape[-1] ** -0.5) @ key.mT  # (B, heads, N, N)
        shares = _talk(self.proj_l, scores).softmax(-1)
        weights = _talk(self.proj_w, shares)
        out: Tensor = self.proj(join(weights @ value))  # (B, N, C)
        return (out, weights) if need_weights else out


def _talk(mixture: nn.Linear, maps: Tensor) -> Tensor:
    """Mix `(B, heads, N, N)` across heads."""
    mixed: Tensor = mixture(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return mixed
