"""Talking-heads attention."""

from __future__ import annotations

from torch import Tensor, nn

from visattn.nn.shapes import check_tokens
from visattn.nn.tokens.heads import check_heads, join, split_qkv


class TalkingHeadsAttention(nn.Module):
    """Talking heads: the scores of all heads are mixed before the softmax, and the weights after it.

    `A = P_w softmax(P_l (Q K^T / sqrt(d)))`, where `P_l` and `P_w` act across heads, then `A V`, heads joined and projected. No fused
    kernel does this, so weights are always written out. Names and shapes of its parameters are those of timm's `TalkingHeadAttn`.

    Args:
        channels: C.
        heads: A divisor of C.
        qkv_bias: Whether queries, keys and values have biases.

    Shape:
        `(B, N, C)` to the same. With `need_weights=True` also the weights behind `P_w`, `(B, heads, N, N)`: those that multiply the
        values. Their rows need not sum to 1 and may be negative.

    Raises:
        OptionError: If heads do not divide the channels.
        ShapeError: In the forward, if the input is not `(B, N, C)`.

    Reference:
        Shazeer et al., "Talking-Heads Attention", 2020, arXiv:2003.02436. Differs: both mixtures have biases and as many heads on
        either side, as in CaiT.
    """

    def __init__(self, channels: int, heads: int = 8, *, qkv_bias: bool = False) -> None:
        """Build with PyTorch's initial values of a linear layer."""
        super().__init__()
        check_heads(channels, heads)
        self.channels, self.heads = channels, heads
        self.qkv = nn.Linear(channels, 3 * channels, bias=qkv_bias)
        self.proj_l = nn.Linear(heads, heads)
        self.proj_w = nn.Linear(heads, heads)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Let each token attend to all."""
        check_tokens(self, x, self.channels)
        query, key, value = split_qkv(self.qkv(x), self.heads)
        scores = (query * query.shape[-1] ** -0.5) @ key.mT  # (B, heads, N, N)
        shares = _talk(self.proj_l, scores).softmax(-1)
        weights = _talk(self.proj_w, shares)
        out: Tensor = self.proj(join(weights @ value))
        return (out, weights) if need_weights else out


def _talk(mixture: nn.Linear, maps: Tensor) -> Tensor:
    """Mix `(B, heads, N, N)` across heads."""
    mixed: Tensor = mixture(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return mixed
