"""Multi-head attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from visattn.errors import ShapeError
from visattn.nn.shapes import check_tokens, is_traced, shape_text
from visattn.nn.tokens.heads import check_heads, check_mask, join, mix, split, split_qkv


class MultiHeadAttention(nn.Module):
    """Multi-head attention: in each head a token takes a mean of values, weighted by how its query meets their keys.

    `softmax(Q K^T / sqrt(d)) V` per head, heads joined and projected. Tokens attend to each other, or to the keys that are given.
    `qkv` has the rows of queries, keys and values in this order, each by heads, as `qkv` of timm's `Attention`, whose names these
    are, and `in_proj_weight` of `nn.MultiheadAttention`, whose checkpoints `load_checkpoint` takes. The fused kernel runs unless
    weights are asked for.

    Args:
        channels: C, of all tokens; bring keys of another width to it with a linear layer.
        heads: A divisor of C.
        qkv_bias: Whether queries, keys and values have biases; the projection behind the heads always has.

    Shape:
        Query `(B, Q, C)`, key and value `(B, K, C)`, by default the query and the key, to `(B, Q, C)`. The mask is boolean, True
        where a query may attend (`nn.MultiheadAttention` means the opposite), and broadcasts to `(B, Q, K)`, or to
        `(B, heads, Q, K)` if it has four axes; `valid[:, None]` hides padded keys. A query that may attend nowhere takes 0. With
        `need_weights=True` also the weights, `(B, heads, Q, K)`, not averaged over heads.

    Raises:
        OptionError: If heads do not divide the channels or the mask is not boolean.
        ShapeError: In the forward, if a shape is another.

    Reference:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv:1706.03762.
    """

    def __init__(self, channels: int, heads: int = 8, *, qkv_bias: bool = True) -> None:
        """Build with PyTorch's initial values of a linear layer."""
        super().__init__()
        check_heads(channels, heads)
        self.channels, self.heads = channels, heads
        self.qkv = nn.Linear(channels, 3 * channels, bias=qkv_bias)
        self.proj = nn.Linear(channels, channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend to `value` at `key`, or to the tokens themselves."""
        q, k, v = self._project(query, key, value)
        if mask is not None:
            mask = mask[:, None] if mask.ndim == 3 else mask
            check_mask(mask, (*q.shape[:3], k.shape[2]))
        out, weights = mix(q, k, v, mask, need_weights=need_weights)
        out = self.proj(join(out))
        return out if weights is None else (out, weights)

    def _project(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of each head; in one product where they are of the same tokens."""
        check_tokens(self, query, self.channels)
        if key is None and value is None:
            return split_qkv(self.qkv(query), self.heads)
        key = query if key is None else key
        value = key if value is None else value
        for tokens in (key, value):
            check_tokens(self, tokens, self.channels)
        if not is_traced(key) and not (query.shape[0] == key.shape[0] and key.shape[:2] == value.shape[:2]):
            got = f"{shape_text(query)}, {shape_text(key)} and {shape_text(value)}"
            raise ShapeError(f"query, key and value must be one batch, with a value for each key, got {got}. Expand them first.")
        rows = [slice(i * self.channels, (i + 1) * self.channels) for i in range(3)]
        weight, bias = self.qkv.weight, self.qkv.bias
        q, k, v = (
            split(F.linear(x, weight[part], None if bias is None else bias[part]), self.heads)
            for x, part in zip((query, key, value), rows, strict=True)
        )
        return q, k, v
