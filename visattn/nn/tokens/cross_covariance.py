"""Cross-covariance attention (XCiT)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn.nn.shapes import check_tokens
from visattn.nn.tokens.heads import check_heads, mix, split_qkv


class CrossCovarianceAttention(nn.Module):
    """Cross-covariance attention: channels attend to channels, so its cost is linear in the number of tokens.

    Per head `A = softmax(t q k^T)` with `q` and `k` of shape `(d, N)`, each of their rows of length 1 over the tokens, and a learned
    temperature `t`; then `A v`, heads joined and projected. **There is no map over the image in it**: `A` says which channels are
    mixed, and each token is treated alike. Names and shapes of its parameters are those of timm's `XCA`.

    Args:
        channels: C.
        heads: A divisor of C.
        qkv_bias: Whether queries, keys and values have biases.

    Shape:
        `(B, N, C)` to the same. With `need_weights=True` also the weights between channels, `(B, heads, d, d)` with `d = C / heads`.

    Raises:
        OptionError: If heads do not divide the channels.
        ShapeError: In the forward, if the input is not `(B, N, C)`.

    Reference:
        El-Nouby et al., "XCiT: Cross-Covariance Image Transformers", NeurIPS 2021, arXiv:2106.09681. Its temperature is trained
        without weight decay.
    """

    def __init__(self, channels: int, heads: int = 8, *, qkv_bias: bool = False) -> None:
        """Build with PyTorch's initial values of a linear layer and temperatures of 1."""
        super().__init__()
        check_heads(channels, heads)
        self.channels, self.heads = channels, heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv = nn.Linear(channels, 3 * channels, bias=qkv_bias)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Mix the channels of each head."""
        check_tokens(self, x, self.channels)
        query, key, value = (part.mT for part in split_qkv(self.qkv(x), self.heads))  # (B, heads, d, N)
        query, key = F.normalize(query, dim=-1) * self.temperature, F.normalize(key, dim=-1)
        out, weights = mix(query, key, value, scale=1.0, need_weights=need_weights)
        out = self.proj(out.permute(0, 3, 1, 2).flatten(2))
        return out if weights is None else (out, weights)
