"""Score functions between queries and keys, and attention with given scores.

Each score module maps queries `(B, T, dq)` and keys `(B, N, dk)` to scores `(B, T, N)`. `attend` turns scores into weights and applies
them: `attend(score(query, keys), value)`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn.errors import OptionError, ShapeError
from visattn.nn.shape_checks import check_tokens, is_traced, shape_text
from visattn.nn.tokens.multihead import check_mask, softmax


def attend(scores: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the mean of the values, weighted by the softmax of the scores.

    Args:
        scores: `(B, T, N)`.
        value: `(B, N, dv)`.
        mask: Boolean mask, True where a query may attend; it broadcasts to the scores. A query that may attend nowhere gives 0.
            `nn.MultiheadAttention` uses the opposite, so invert its masks: `~mask`.

    Returns:
        The output `(B, T, dv)`, and the weights `(B, T, N)`, whose rows sum to 1, or to 0 if everything is masked.

    Raises:
        OptionError: If the mask is not boolean.
        ShapeError: If a shape is wrong.
    """
    check_value(scores, value)
    check_mask(mask, scores.shape)
    weights = softmax(scores, mask)
    return weights.to(value.dtype) @ value, weights


class AdditiveScore(nn.Module):
    """Additive score: a small network scores the query and the key together.

    `v . tanh(W_q q + W_k k + b)`. Without `b` it is Luong's `concat`, `v . tanh(W [q; k])` with `W = [W_q W_k]`.

    Args:
        query_dim: Width of a query, dq.
        key_dim: Width of a key, dk.
        attention_dim: Width of the hidden layer, dk by default.
        bias: Whether to use the bias `b`.

    Shape:
        Queries `(B, T, dq)` and keys `(B, N, dk)` to `(B, T, N)`. Memory grows with `T * N * attention_dim`.

    Raises:
        OptionError: If a width is below 1.
        ShapeError: In the forward pass, if a shape is wrong.

    Reference:
        Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate", ICLR 2015, arXiv:1409.0473.
    """

    def __init__(self, query_dim: int, key_dim: int, *, attention_dim: int | None = None, bias: bool = True) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        self.query_dim, self.key_dim = at_least("query_dim", query_dim), at_least("key_dim", key_dim)
        attention_dim = key_dim if attention_dim is None else at_least("attention_dim", attention_dim)
        self.query = nn.Linear(query_dim, attention_dim, bias=False)
        self.key = nn.Linear(key_dim, attention_dim, bias=bias)
        self.vector = nn.Linear(attention_dim, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score each pair of query and key."""
        _check(self, query, keys, self.query_dim, self.key_dim)
        hidden = self.query(query)[:, :, None] + self.key(keys)[:, None]  # (B, T, N, width)
        scores: Tensor = self.vector(hidden.tanh()).squeeze(-1)
        return scores


class DotScore(nn.Module):
    """Dot score: `q . k`.

    Shape:
        Queries `(B, T, d)` and keys `(B, N, d)` to `(B, T, N)`.

    Raises:
        ShapeError: In the forward pass, if a shape is wrong.

    Reference:
        Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015, arXiv:1508.04025.
    """

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score each pair of query and key."""
        _check(self, query, keys)
        return query @ keys.mT


class ScaledDotScore(nn.Module):
    """Scaled dot score: `q . k / sqrt(d)`. Its variance is 1 if the entries of query and key are independent with variance 1.

    Shape:
        Queries `(B, T, d)` and keys `(B, N, d)` to `(B, T, N)`.

    Raises:
        ShapeError: In the forward pass, if a shape is wrong.

    Reference:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv:1706.03762.
    """

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score each pair of query and key."""
        _check(self, query, keys)
        return (query / math.sqrt(query.shape[-1])) @ keys.mT


class GeneralScore(nn.Module):
    """General score: `(W q) . k`, the dot score after projecting the query to the width of the keys.

    Args:
        query_dim: Width of a query, dq.
        key_dim: Width of a key, dk.

    Shape:
        Queries `(B, T, dq)` and keys `(B, N, dk)` to `(B, T, N)`.

    Raises:
        OptionError: If a width is below 1.
        ShapeError: In the forward pass, if a shape is wrong.

    Reference:
        Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015, arXiv:1508.04025. The paper writes
        `q^T W k`. Here and in the authors' code `W` is transposed and applied to the queries, which are fewer.
    """

    def __init__(self, query_dim: int, key_dim: int) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        self.query_dim, self.key_dim = at_least("query_dim", query_dim), at_least("key_dim", key_dim)
        self.query = nn.Linear(query_dim, key_dim, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score each pair of query and key."""
        _check(self, query, keys, self.query_dim, self.key_dim)
        brought: Tensor = self.query(query)
        return brought @ keys.mT


class CosineScore(nn.Module):
    """Cosine score: `beta cos(q, k)`, which does not depend on the norms of query and key; `beta` sets how sharp the weights are.

    Args:
        beta: Factor on the cosine, above 0; the start value if it is learned.
        learned: Whether `beta` is learned, as the softplus of a parameter.

    Shape:
        Queries `(B, T, d)` and keys `(B, N, d)` to `(B, T, N)`, in `[-beta, beta]`; 0 for a vector of zeros.

    Raises:
        OptionError: If `beta` is not above 0.
        ShapeError: In the forward pass, if a shape is wrong.

    Reference:
        Graves et al., "Neural Turing Machines", 2014, arXiv:1410.5401. Differs: there the controller emits a `beta` at each step.
    """

    def __init__(self, beta: float = 1.0, *, learned: bool = False) -> None:
        """Build the module; a learned `beta` starts at the given one."""
        super().__init__()
        if not 0 < beta < math.inf:
            raise OptionError(f"beta must be above 0, got {beta}. With 1 the scores lie in [-1, 1].")
        start = beta + math.log(-math.expm1(-beta))  # inverse of softplus
        self.raw = nn.Parameter(torch.tensor(start)) if learned else None
        self._beta = beta

    @property
    def beta(self) -> Tensor | float:
        """Factor on the cosine."""
        return self._beta if self.raw is None else F.softplus(self.raw)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score each pair of query and key."""
        _check(self, query, keys)
        return self.beta * (F.normalize(query, dim=-1) @ F.normalize(keys, dim=-1).mT)


class LocationScore(nn.Module):
    """Location score: `W q`, one number per location. The keys are not used.

    Args:
        query_dim: Width of a query, dq.
        num_locations: Number of locations, N, which is the same for every image.

    Shape:
        Queries `(B, T, dq)` and keys `(B, N, dk)` of any width to `(B, T, N)`.

    Raises:
        OptionError: If a number is below 1.
        ShapeError: In the forward pass, if the number of keys is not N or the queries have another width.

    Reference:
        Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015, arXiv:1508.04025.
    """

    def __init__(self, query_dim: int, num_locations: int) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        self.query_dim, self.num_locations = at_least("query_dim", query_dim), at_least("num_locations", num_locations)
        self.place = nn.Linear(query_dim, num_locations, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score each location."""
        _check(self, query, keys, self.query_dim, None)
        if not is_traced(keys) and keys.shape[1] != self.num_locations:
            raise ShapeError(
                f"LocationScore must be given {self.num_locations} keys, got {keys.shape[1]}. Set num_locations to the number of keys."
            )
        scores: Tensor = self.place(query)
        return scores


def check_value(scores: Tensor, value: Tensor) -> None:
    """Check that scores are `(B, T, N)` and values `(B, N, dv)`.

    Raises:
        ShapeError: If they are not.
    """
    if is_traced(scores):
        return
    if scores.ndim != 3 or value.ndim != 3 or (scores.shape[0], scores.shape[2]) != value.shape[:2]:
        got = f"{shape_text(scores)} and {shape_text(value)}"
        raise ShapeError(f"scores must be (B, T, N) and values (B, N, dv), got {got}. Pass a single query as x[:, None].")


def _check(module: nn.Module, query: Tensor, keys: Tensor, query_dim: int | None = None, key_dim: int | None = None) -> None:
    """Check queries `(B, T, dq)` and keys `(B, N, dk)`. Without `query_dim`, both must have the same width; without `key_dim`, any."""
    if is_traced(query):
        return
    for x, dim in ((query, query_dim), (keys, key_dim)):
        check_tokens(module, x, x.shape[-1] if dim is None else dim)
    unlike = query_dim is None and query.shape[-1] != keys.shape[-1]
    if unlike or query.shape[0] != keys.shape[0]:
        what = f"queries and keys of the same {'width' if unlike else 'batch'}"
        raise ShapeError(
            f"{type(module).__name__} must be given {what}, got {shape_text(query)} and {shape_text(keys)}. "
            + ("Use GeneralScore for two widths." if unlike else "Expand one of them to the batch size of the other.")
        )
