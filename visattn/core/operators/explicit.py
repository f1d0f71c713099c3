"""Operators with explicit weights, and linear combinations of operators."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from visattn.core.operators.images import of_image
from visattn.core.operators.operator import Operator, computing, token_counts
from visattn.core.operators.softmax import unblocked
from visattn.errors import ShapeError


class MatrixOperator(Operator):
    """Operator with explicit weights, for models that compute them themselves. Rows need not sum to 1."""

    batched = "weights", "query", "key"

    def __init__(
        self,
        weights: Tensor,
        query_index: Tensor | None = None,
        key_index: Tensor | None = None,
        *,
        query: Tensor | None = None,
        key: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Store the weights.

        Args:
            weights: `(B, heads, q, k)`, or `(B, heads, blocks, q, k)` with indices.
            query_index: `(blocks, q)` token index of each row; -1 is padding.
            key_index: `(blocks, k)` token index of each column; -1 is padding.
            query: Query vectors `(B, heads, [blocks,] q, d)`, if they are known. No product uses them.
            key: Key vectors `(B, heads, [blocks,] k, d)`.
            dtype: Type in which products are computed, float32 or float64.

        Raises:
            ShapeError: If the shapes do not fit.
        """
        if weights.ndim not in (4, 5) or (weights.ndim == 5 and query_index is None):
            raise ShapeError(f"weights must be (B, heads, Q, K), got {tuple(weights.shape)}. Add a batch axis: weights[None].")
        self.weights = weights[:, :, None] if weights.ndim == 4 else weights
        self.dtype = computing(dtype)
        rows, columns = self.weights.shape[3:]
        self.query_index, self.key_index = query_index, key_index
        self.query, self.key = (x[:, :, None] if x is not None and x.ndim == 4 else x for x in (query, key))
        sizes = token_counts(query_index, key_index, (self.weights.shape[2], rows), (self.weights.shape[2], columns))
        self.shape = weights.shape[0], weights.shape[1], *sizes

    @property
    def device(self) -> torch.device:
        """Device on which the operator computes."""
        return self.weights.device

    @cached_property
    def probability(self) -> bool:
        """True if rows are distributions, which they are not for talking heads or gated attention."""
        slack = max(1e-4, 4 * torch.finfo(self.weights.dtype).eps)
        sums = self.weights.sum(-1, dtype=torch.float32)
        return bool((self.weights >= 0).all()) and bool((((sums - 1).abs() < slack) | (sums == 0)).all())

    def queries(self) -> Tensor:
        """Return the query vectors, `(B, heads, Q, d)`, without padding; see `Operator.queries`."""
        return super().queries() if self.query is None else unblocked(self.query, self.query_index, self.shape[2])

    def keys(self) -> Tensor:
        """Return the key vectors, `(B, heads, K, d)`, without padding; see `Operator.queries`."""
        return super().keys() if self.key is None else unblocked(self.key, self.key_index, self.shape[3])

    def to(self, dtype: torch.dtype) -> MatrixOperator:
        """Return the operator with another compute type."""
        changed = copy.copy(self)
        changed.dtype = computing(dtype)
        return changed

    def _block(self, block: int, scratch: bool = False) -> Callable[[slice | Tensor], Tensor]:
        return lambda rows: self.weights[:, :, block, rows].to(self.dtype)


class SumOperator(Operator):
    """Linear combination of operators, `A = sum_i c_i A_i`; differential attention is `A_1 - lambda A_2`."""

    def __init__(self, terms: Sequence[tuple[float | Tensor, Operator]]) -> None:
        """Store the terms.

        Args:
            terms: Pairs of a coefficient and an operator. A coefficient is a number or a tensor that broadcasts to `(B, heads, q, k)`.

        Raises:
            ShapeError: If there are no terms, or they differ in shape or token order.
        """
        if not terms:
            raise ShapeError("a SumOperator must have at least one term, got none.")
        first = terms[0][1]
        for _, operator in terms:
            same = all(
                (a is None) == (b is None) and (a is None or torch.equal(a, b))  # type: ignore[arg-type]
                for a, b in ((operator.query_index, first.query_index), (operator.key_index, first.key_index))
            )
            if operator.shape != first.shape or not same:
                raise ShapeError(f"terms must share one shape and token order, got {[o.shape for _, o in terms]}.")
        self.terms = tuple(terms)
        self.shape, self.dtype = first.shape, first.dtype
        self.query_index, self.key_index = first.query_index, first.key_index

    @property
    def device(self) -> torch.device:
        """Device on which the operator computes."""
        return self.terms[0][1].device

    @property
    def probability(self) -> bool:
        """False, as terms may be subtracted."""
        return False

    def image(self, number: int) -> SumOperator:
        """Return the operator of one image; see `Operator.image`."""
        axes, batch = len(self.shape), self.shape[0]
        one = SumOperator(
            [
                (of_image(c, number, batch) if isinstance(c, Tensor) and c.ndim == axes else c, operator.image(number))
                for c, operator in self.terms  # with fewer axes, the first one of a coefficient is not the batch
            ]
        )
        one.gradient = None if self.gradient is None else self.gradient.image(number)
        return one

    def to(self, dtype: torch.dtype) -> SumOperator:
        """Return the operator with another compute type."""
        return SumOperator([(coefficient, operator.to(dtype)) for coefficient, operator in self.terms])

    def _block(self, block: int, scratch: bool = False) -> Callable[[slice | Tensor], Tensor]:
        parts = [(coefficient, operator._block(block, scratch)) for coefficient, operator in self.terms]
        return lambda rows: sum((c * weights(rows) for c, weights in parts[1:]), parts[0][0] * parts[0][1](rows))
