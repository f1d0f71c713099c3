"""Class attention (CaiT)."""

from __future__ import annotations

from torch import Tensor, nn

from visattn.nn.shapes import check_tokens
from visattn.nn.tokens.heads import check_heads, join, mix, split


class ClassAttention(nn.Module):
    """Class attention: only the class token asks; it gathers from the patches and from itself.

    `softmax(q_cls K^T / sqrt(d)) V` per head, heads joined and projected. The patches pass by: put the result in the place of the
    class token. Names and shapes of its parameters are those of timm's `ClassAttn`.

    Args:
        channels: C.
        heads: A divisor of C.
        qkv_bias: Whether query, key and value have biases.

    Shape:
        `(B, 1 + N, C)`, the class token first, to `(B, 1, C)`. With `need_weights=True` also the weights, `(B, heads, 1, 1 + N)`.

    Raises:
        OptionError: If heads do not divide the channels.
        ShapeError: In the forward, if the input is not `(B, 1 + N, C)`.

    Reference:
        Touvron et al., "Going Deeper with Image Transformers", ICCV 2021, arXiv:2103.17239. The layer scale of its blocks is not in
        here.
    """

    def __init__(self, channels: int, heads: int = 8, *, qkv_bias: bool = False) -> None:
        """Build with PyTorch's initial values of a linear layer."""
        super().__init__()
        check_heads(channels, heads)
        self.channels, self.heads = channels, heads
        self.q, self.k, self.v = (nn.Linear(channels, channels, bias=qkv_bias) for _ in range(3))
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """What the class token gathers."""
        check_tokens(self, x, self.channels)
        query, key, value = (split(part, self.heads) for part in (self.q(x[:, :1]), self.k(x), self.v(x)))
        out, weights = mix(query, key, value, need_weights=need_weights)
        out = self.proj(join(out))
        return out if weights is None else (out, weights)
