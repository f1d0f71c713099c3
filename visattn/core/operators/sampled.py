"""Operator of attention to sampled points: a few shares per query, each of which belongs to one key."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from visattn.core.operators.operator import Operator, computing, token_counts
from visattn.errors import ShapeError


class SampledOperator(Operator):
    """Attention whose rows have few entries: `A[q, cells[q, i]] += shares[q, i]`. Rows need not sum to 1."""

    batched = "cells", "shares"

    def __init__(
        self,
        cells: Tensor,
        shares: Tensor,
        keys: int,
        query_index: Tensor | None = None,
        key_index: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Store the entries.

        Args:
            cells: Index of the key of each entry, `(B, heads, q, n)`, or `(B, heads, blocks, q, n)` with indices.
            shares: Weight of each entry, of the same shape.
            keys: Number of keys in a block, k.
            query_index: `(blocks, q)` token index of each row; -1 is padding.
            key_index: `(blocks, k)` token index of each key; -1 is padding.
            dtype: Type in which products are computed, float32 or float64.

        Raises:
            ShapeError: If the shapes do not fit.
        """
        if cells.shape != shares.shape or cells.ndim not in (4, 5):
            raise ShapeError(
                f"cells and shares must both be (B, heads, Q, n), got {tuple(cells.shape)} and {tuple(shares.shape)}."
            )
        self.cells, self.shares = (x[:, :, None] if x.ndim == 4 else x for x in (cells, shares))
        self._keys, self.dtype = keys, computing(dtype)
        self.query_index, self.key_index = query_index, key_index
        blocks, rows = self.cells.shape[2:4]
        self.shape = cells.shape[0], cells.shape[1], *token_counts(query_index, key_index, (blocks, rows), (blocks, keys))

    @property
    def device(self) -> torch.device:
        """Device on which the operator computes."""
        return self.cells.device

    @property
    def probability(self) -> bool:
        """False: what is sampled outside of the grid is missing from a row."""
        return False

    def to(self, dtype: torch.dtype) -> SampledOperator:
        """Return the operator with another compute type."""
        changed = copy.copy(self)
        changed.dtype = computing(dtype)
        return changed

    def _block(self, block: int, scratch: bool = False) -> Callable[[slice | Tensor], Tensor]:
        def weights(rows: slice | Tensor) -> Tensor:
            cells, shares = self.cells[:, :, block, rows], self.shares[:, :, block, rows].to(self.dtype)
            return shares.new_zeros(*cells.shape[:-1], self._keys).scatter_add_(-1, cells, shares)

        return weights
