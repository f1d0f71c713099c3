"""Cross-covariance attention (XCiT)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn.nn.shape_checks import check_tokens
from visattn.nn.tokens.multihead import check_heads, mix, split_qkv


class CrossCovarianceAttention(nn.Module):
    """Cross-covariance attention: channels attend to channels, so the cost is linear in the number of tokens.

    Per head `A = softmax(t q k^T)`, where `q` and `k` have shape `(d, N)`, each row is L2-normalized over the tokens, and `t` is a learned
    temperature. The output is `A v`, heads concatenated and projected. **`A` is no map over the image**: it weights channels, in the same
    way for every token. Parameter names and shapes are those of timm's `XCA`.

    Args:
        embed_dim: Width of a token, C.
        num_heads: Number of heads, a divisor of C.
        qkv_bias: Whether the query, key and value projections have a bias.

    Shape:
        `(B, N, C)` to `(B, N, C)`. With `need_weights=True` also the weights between channels, `(B, heads, d, d)` with `d = C / heads`.

    Raises:
        OptionError: If `num_heads` does not divide `embed_dim`.
        ShapeError: In the forward pass, if the input is not `(B, N, C)`.

    Reference:
        El-Nouby et al., "XCiT: Cross-Covariance Image Transformers", NeurIPS 2021, arXiv:2106.09681. The authors train the temperature
        without weight decay.
    """

    def __init__(self, embed_dim: int, num_heads: int = 8, *, qkv_bias: bool = False) -> None:
        """Build with PyTorch's default initialization and temperatures of 1."""
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Attend between the channels of each head."""
        check_tokens(self, x, self.embed_dim)
        query, key, value = (part.mT for part in split_qkv(self.qkv(x), self.num_heads))  # (B, heads, d, N)
        query, key = F.normalize(query, dim=-1) * self.temperature, F.normalize(key, dim=-1)
        out, weights = mix(query, key, value, scale=1.0, need_weights=need_weights)  # (B, heads, d, N), (B, heads, d, d)
        out = self.proj(out.permute(0, 3, 1, 2).flatten(2))  # (B, N, C)
        return out if weights is None else (out, weights)
