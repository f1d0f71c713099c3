"""Multi-head attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from visattn.errors import ShapeError
from visattn.nn.shape_checks import check_tokens, is_traced, shape_text
from visattn.nn.tokens.multihead import check_heads, check_mask, join, mix, split, split_qkv


class MultiHeadAttention(nn.Module):
    """Multi-head attention: each head computes a weighted mean of the values; weights are a softmax over query-key scores.

    `softmax(Q K^T / sqrt(d)) V` per head, then heads are concatenated and projected. Tokens attend to each other (self-attention), or to
    the given keys (cross-attention).

    The rows of `qkv` are queries, keys and values in this order, each ordered by head. Parameter names and this order are those of timm's
    `Attention`. `in_proj_weight` of `nn.MultiheadAttention` has the same order, so `load_checkpoint` accepts its checkpoints. A fused
    kernel runs unless the weights are needed.

    Args:
        embed_dim: Width of all tokens, C. Project keys and values of another width with a linear layer first.
        num_heads: Number of heads, a divisor of C.
        qkv_bias: Whether the query, key and value projections have a bias. The output projection always has one.

    Shape:
        Query `(B, Q, C)`, key and value `(B, K, C)` to `(B, Q, C)`. The key defaults to the query, and the value to the key. The mask is
        boolean, True where a query may attend (`nn.MultiheadAttention` uses the opposite). It broadcasts to `(B, Q, K)`, or to
        `(B, heads, Q, K)` if it has four axes; `valid[:, None]` hides padded keys. A query that may attend nowhere gives 0. With
        `need_weights=True` also the weights, `(B, heads, Q, K)`, not averaged over heads.

    Raises:
        OptionError: If `num_heads` does not divide `embed_dim`, or the mask is not boolean.
        ShapeError: In the forward pass, if a shape is wrong.

    Reference:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv:1706.03762.
    """

    def __init__(self, embed_dim: int, num_heads: int = 8, *, qkv_bias: bool = True) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from `query` to `key` and `value`, by default to the query tokens themselves."""
        q, k, v = self._project(query, key, value)  # (B, heads, Q, d), twice (B, heads, K, d)
        if mask is not None:
            mask = mask[:, None] if mask.ndim == 3 else mask
            check_mask(mask, (*q.shape[:3], k.shape[2]))
        out, weights = mix(q, k, v, mask, need_weights=need_weights)
        out = self.proj(join(out))  # (B, Q, C)
        return out if weights is None else (out, weights)

    def _project(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project to query, key and value of each head; self-attention needs a single matrix product."""
        check_tokens(self, query, self.embed_dim)
        if key is None and value is None:
            return split_qkv(self.qkv(query), self.num_heads)
        key = query if key is None else key
        value = key if value is None else value
        for tokens in (key, value):
            check_tokens(self, tokens, self.embed_dim)
        if not is_traced(key) and not (query.shape[0] == key.shape[0] and key.shape[:2] == value.shape[:2]):
            got = f"{shape_text(query)}, {shape_text(key)} and {shape_text(value)}"
            raise ShapeError(
                f"query, key and value must have the same batch size, with a value for each key, got {got}. Expand them first."
            )
        rows = [slice(i * self.embed_dim, (i + 1) * self.embed_dim) for i in range(3)]
        weight, bias = self.qkv.weight, self.qkv.bias
        q, k, v = (
            split(F.linear(x, weight[part], None if bias is None else bias[part]), self.num_heads)
            for x, part in zip((query, key, value), rows, strict=True)
        )
        return q, k, v
