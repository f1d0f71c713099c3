"""How well a query fits each key, and what it takes of the values for it.

In: queries `(B, T, dq)` and keys `(B, N, dk)`. Each score gives `(B, T, N)`, and `attend` makes weights of them: `attend(score(query,
keys), value)`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn.errors import OptionError, ShapeError
from visattn.nn.shapes import at_least, check_tokens, is_traced, shape_text
from visattn.nn.tokens.heads import check_mask, softmax


def attend(scores: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The mean of the values, weighted by the softmax of the scores.

    Args:
        scores: `(B, T, N)`.
        value: `(B, N, dv)`.
        mask: Boolean, True where a query may attend; it broadcasts to the scores. A query that may attend nowhere takes 0.
            `nn.MultiheadAttention` means the opposite: pass `~mask` of its masks.

    Returns:
        `(B, T, dv)` and the weights, `(B, T, N)`, whose rows sum to 1, or to 0 where all is masked.

    Raises:
        OptionError: If the mask is not boolean.
        ShapeError: If a shape is another.
    """
    check_value(scores, value)
    check_mask(mask, scores.shape)
    weights = softmax(scores, mask)
    return weights.to(value.dtype) @ value, weights


class AdditiveScore(nn.Module):
    """Additive score: a small network sees the query and the key.

    `v . tanh(W_q q + W_k k + b)`. Without `b` it is Luong's `concat`, `v . tanh(W [q; k])` with `W = [W_q W_k]`.

    Args:
        query_width: dq.
        key_width: dk.
        width: Of the hidden layer, by default dk.
        bias: Whether there is `b`.

    Shape:
        Queries `(B, T, dq)` and keys `(B, N, dk)` to `(B, T, N)`; memory is `T N width`.

    Raises:
        OptionError: If a width is below 1.
        ShapeError: In the forward, if a shape is another.

    Reference:
        Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate", ICLR 2015, arXiv:1409.0473.
    """

    def __init__(self, query_width: int, key_width: int, *, width: int | None = None, bias: bool = True) -> None:
        """Build with PyTorch's initial values of a linear layer."""
        super().__init__()
        self.query_width, self.key_width = at_least("query_width", query_width), at_least("key_width", key_width)
        width = key_width if width is None else at_least("width", width)
        self.query = nn.Linear(query_width, width, bias=False)
        self.key = nn.Linear(key_width, width, bias=bias)
        self.vector = nn.Linear(width, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score each pair."""
        _check(self, query, keys, self.query_width, self.key_width)
        hidden = self.query(query)[:, :, None] + self.key(keys)[:, None]  # (B, T, N, width)
        scores: Tensor = self.vector(hidden.tanh()).squeeze(-1)
        return scores


class DotScore(nn.Module):
    """Dot score: `q . k`.

    Shape:
        Queries `(B, T, d)` and keys `(B, N, d)` to `(B, T, N)`.

    Raises:
        ShapeError: In the forward, if a shape is another.

    Reference:
        Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015, arXiv:1508.04025.
    """

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score each pair."""
        _check(self, query, keys)
        return query @ keys.mT


class ScaledDotScore(nn.Module):
    """Scaled dot score: `q . k / sqrt(d)`, of variance 1 if the numbers of query and key are.

    Shape:
        Queries `(B, T, d)` and keys `(B, N, d)` to `(B, T, N)`.

    Raises:
        ShapeError: In the forward, if a shape is another.

    Reference:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv:1706.03762.
    """

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score each pair."""
        _check(self, query, keys)
        return (query / math.sqrt(query.shape[-1])) @ keys.mT


class GeneralScore(nn.Module):
    """General score: `(W q) . k`, a dot score of keys with the query brought to their width.

    Args:
        query_width: dq.
        key_width: dk.

    Shape:
        Queries `(B, T, dq)` and keys `(B, N, dk)` to `(B, T, N)`.

    Raises:
        OptionError: If a width is below 1.
        ShapeError: In the forward, if a shape is another.

    Reference:
        Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015, arXiv:1508.04025. The
        paper writes `q^T W k`; `W` is transposed here and in the authors' code, which multiplies the few queries with it.
    """

    def __init__(self, query_width: int, key_width: int) -> None:
        """Build with PyTorch's initial values of a linear layer."""
        super().__init__()
        self.query_width, self.key_width = at_least("query_width", query_width), at_least("key_width", key_width)
        self.query = nn.Linear(query_width, key_width, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score each pair."""
        _check(self, query, keys, self.query_width, self.key_width)
        brought: Tensor = self.query(query)
        return brought @ keys.mT


class CosineScore(nn.Module):
    """Cosine score: `beta cos(q, k)`, blind to the lengths of both; `beta` says how sharp the weights are.

    Args:
        beta: Above 0.
        learned: Whether `beta` is learned, as the softplus of a parameter.

    Shape:
        Queries `(B, T, d)` and keys `(B, N, d)` to `(B, T, N)`, in `[-beta, beta]`; 0 for a vector of zeros.

    Raises:
        OptionError: If `beta` is not above 0.
        ShapeError: In the forward, if a shape is another.

    Reference:
        Graves et al., "Neural Turing Machines", 2014, arXiv:1410.5401. Differs: there the controller gives a `beta` at each step.
    """

    def __init__(self, beta: float = 1.0, *, learned: bool = False) -> None:
        """Build so that it starts at `beta`."""
        super().__init__()
        if not 0 < beta < math.inf:
            raise OptionError(f"beta must be above 0, got {beta}. With 1 the scores lie in [-1, 1].")
        start = beta + math.log(-math.expm1(-beta))  # softplus undone
        self.raw = nn.Parameter(torch.tensor(start)) if learned else None
        self._beta = beta

    @property
    def beta(self) -> Tensor | float:
        """The factor."""
        return self._beta if self.raw is None else F.softplus(self.raw)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score each pair."""
        _check(self, query, keys)
        return self.beta * (F.normalize(query, dim=-1) @ F.normalize(keys, dim=-1).mT)


class LocationScore(nn.Module):
    """Location score: `W q`, one number for each place; keys are not looked at.

    Args:
        query_width: dq.
        places: N, the same for every image.

    Shape:
        Queries `(B, T, dq)` and keys `(B, N, dk)` of any width to `(B, T, N)`.

    Raises:
        OptionError: If a number is below 1.
        ShapeError: In the forward, if there are other than N keys or queries have another width.

    Reference:
        Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015, arXiv:1508.04025.
    """

    def __init__(self, query_width: int, places: int) -> None:
        """Build with PyTorch's initial values of a linear layer."""
        super().__init__()
        self.query_width, self.places = at_least("query_width", query_width), at_least("places", places)
        self.place = nn.Linear(query_width, places, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score each place."""
        _check(self, query, keys, self.query_width, None)
        if not is_traced(keys) and keys.shape[1] != self.places:
            raise ShapeError(f"LocationScore must be given {self.places} keys, got {keys.shape[1]}. Build it for their number.")
        scores: Tensor = self.place(query)
        return scores


def check_value(scores: Tensor, value: Tensor) -> None:
    """Refuse scores that are not `(B, T, N)` or values that are not `(B, N, dv)`.

    Raises:
        ShapeError: If they are not.
    """
    if is_traced(scores):
        return
    if scores.ndim != 3 or value.ndim != 3 or (scores.shape[0], scores.shape[2]) != value.shape[:2]:
        got = f"{shape_text(scores)} and {shape_text(value)}"
        raise ShapeError(f"scores must be (B, T, N) and values (B, N, dv), got {got}. One query is x[:, None].")


def _check(module: nn.Module, query: Tensor, keys: Tensor, query_width: int | None = None, key_width: int | None = None) -> None:
    """Refuse what is not `(B, T, dq)` and `(B, N, dk)`; without widths, where both must have the same, or any will do."""
    if is_traced(query):
        return
    for x, width in ((query, query_width), (keys, key_width)):
        check_tokens(module, x, x.shape[-1] if width is None else width)
    unlike = query_width is None and query.shape[-1] != keys.shape[-1]
    if unlike or query.shape[0] != keys.shape[0]:
        what = f"queries and keys of one {'width' if unlike else 'batch'}"
        raise ShapeError(
            f"{type(module).__name__} must be given {what}, got {shape_text(query)} and {shape_text(keys)}. "
            + ("GeneralScore takes two widths." if unlike else "Expand one of them to the other's batch.")
        )
