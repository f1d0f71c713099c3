"""Class attention (CaiT)."""

from __future__ import annotations

from torch import Tensor, nn

from visattn.nn.shape_checks import check_tokens
from visattn.nn.tokens.multihead import check_heads, join, mix, split


class ClassAttention(nn.Module):
    """Class attention: only the class token is a query; it attends to the patches and to itself.

    `softmax(q_cls K^T / sqrt(d)) V` per head, then heads are concatenated and projected. The patches are not updated: replace the class
    token with the result. Parameter names and shapes are those of timm's `ClassAttn`.

    Args:
        embed_dim: Width of a token, C.
        num_heads: Number of heads, a divisor of C.
        qkv_bias: Whether the query, key and value projections have a bias.

    Shape:
        `(B, 1 + N, C)`, the class token first, to `(B, 1, C)`. With `need_weights=True` also the weights, `(B, heads, 1, 1 + N)`.

    Raises:
        OptionError: If `num_heads` does not divide `embed_dim`.
        ShapeError: In the forward pass, if the input is not `(B, 1 + N, C)`.

    Reference:
        Touvron et al., "Going Deeper with Image Transformers", ICCV 2021, arXiv:2103.17239. The LayerScale of its blocks is not included.
    """

    def __init__(self, embed_dim: int, num_heads: int = 8, *, qkv_bias: bool = False) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.q, self.k, self.v = (nn.Linear(embed_dim, embed_dim, bias=qkv_bias) for _ in range(3))
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the new class token."""
        check_tokens(self, x, self.embed_dim)
        # query (B, heads, 1, d); key and value (B, heads, 1 + N, d)
        query, key, value = (split(part, self.num_heads) for part in (self.q(x[:, :1]), self.k(x), self.v(x)))
        out, weights = mix(query, key, value, need_weights=need_weights)
        out = self.proj(join(out))  # (B, 1, C)
        return out if weights is None else (out, weights)
