"""The operator itself: one primitive, a block of rows, and everything that follows from it."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, Self

import torch
from torch import Tensor

from visattn._support.types import Implementation
from visattn.errors import OptionError, ShapeError
from visattn.operators.gradients import Gradient

_SMALL = 1_000_000  # weights that one tile may hold in any case: a short sequence is one tile
PIECE = 192, 768  # queries x keys of a piece: of 6 heads 3.5 MB
ROWS = 128  # query rows of a tile: the softmax of 6 heads x 128 x 5477 keys is 17 MB


class Tile(NamedTuple):
    """A block of rows of `A`, in canonical token order; `weights` and `grad` are `(B, heads, queries, keys)`."""

    queries: Tensor
    keys: Tensor
    weights: Tensor
    grad: Tensor | None = None


class Operator(ABC):
    """A batch of attention matrices `A` of shape `(B, heads, Q, K)`, given row block by row block.

    Attributes:
        shape: `(B, heads, Q, K)` in canonical token order.
        query_index: `(blocks, q)` token of each row, or None for one block in canonical order; -1 is padding.
        key_index: `(blocks, k)` token of each column, likewise.
        dtype: Type in which weights are computed; float32 or float64.
        gradient: The gradient of a score with respect to `A`, where it was asked for.
    """

    gradient: Gradient | None = None
    shape: tuple[int, int, int, int]
    query_index: Tensor | None
    key_index: Tensor | None
    dtype: torch.dtype

    @abstractmethod
    def _block(self, block: int, scratch: bool = False) -> Callable[[slice | Tensor], Tensor]:
        """A function from rows of one block to their weights `(B, heads, rows, k)`, padding included.

        With `scratch` the result may share memory with the one before: fresh pages cost more than the arithmetic.
        """

    def block(self, number: int) -> Tensor:
        """All weights of one block, `(B, heads, q, k)`, in the block's own order and with its padding."""
        return self._block(number)(slice(None))

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Operator:
        """The same operator computing in `dtype` (float32 or float64)."""

    def with_gradient(self, gradient: Gradient) -> Self:
        """The same operator, whose tiles also give the gradient."""
        changed = copy.copy(self)
        changed.gradient = gradient
        return changed

    def pieces(self) -> Iterator[Tile]:
        """All of `A` in blocks that need not be whole rows; where the log-sum-exp of rows is known they are small enough for caches.

        Yields:
            Tiles, to be used before the next is taken: it may overwrite their weights.
        """
        yield from self._tiles()

    def gradient_pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The gradient alone, in blocks that need not be whole rows; no weight is computed.

        Yields:
            Queries, keys and `dA`, `(B, heads, queries, keys)`.

        Raises:
            OptionError: If there is no gradient.
        """
        if self.gradient is None:
            raise OptionError("no gradient was asked for. Use recording.gradients(score).")
        for block in range(1 if self.query_index is None else len(self.query_index)):
            queries, keys = (
                torch.arange(count, device=self.device) if index is None else index[block]
                for index, count in zip((self.query_index, self.key_index), self.shape[2:], strict=True)
            )
            for rows, columns in product(_runs(queries, PIECE[0]), _runs(keys, PIECE[1])):
                yield queries[rows], keys[columns], self.gradient.part(block, rows, columns, self.dtype)

    @property
    def probability(self) -> bool:
        """Whether rows are distributions: not negative, with sum 1 (0 where a row is masked whole)."""
        return True

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the operator computes."""

    def tiles(self, rows: int = ROWS, *, scratch: bool = False) -> Iterator[Tile]:
        """All of `A`, `rows` queries of a block at a time. Padded rows and columns are left out.

        Args:
            rows: Query rows in a tile; memory is `B * heads * rows * K` numbers.
            scratch: Whether weights are wanted only until the next tile: it may then overwrite them, which is faster.

        Returns:
            Tiles whose rows cover every query once.

        Raises:
            OptionError: If `rows` is not positive.
        """
        if rows < 1:
            raise OptionError(f"rows must be at least 1, got {rows}.")
        return self._tiles(rows, scratch)

    def _tiles(self, rows: int = ROWS, scratch: bool = True) -> Iterator[Tile]:
        for queries, keys, weights, real, (block, chosen) in self._raw_tiles(rows, scratch):
            grad = None if self.gradient is None else self.gradient.part(block, chosen, slice(None), self.dtype)
            if real is not None:
                weights, grad = weights[..., real], None if grad is None else grad[..., real]
            yield Tile(queries, keys, weights, grad)

    def _raw_tiles(
        self, rows: int, scratch: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, slice | Tensor]]]:
        """Tiles with padded columns still in `weights`; behind it which are real (None: all), and the block and its rows."""
        if self.query_index is None or self.key_index is None:
            chosen: slice | Tensor
            weights = self._block(0, scratch)
            queries, keys = (torch.arange(count, device=self.device) for count in self.shape[2:])
            for start in range(0, len(queries), rows):
                chosen = slice(start, start + rows)
                yield queries[chosen], keys, weights(chosen), None, (0, chosen)
            return
        for block, (queries, keys) in enumerate(zip(self.query_index, self.key_index, strict=True)):
            weights = self._block(block, scratch)
            real = (keys >= 0).nonzero().flatten()
            padded = len(real) < len(keys)
            for start in range(0, len(queries), rows):
                part = queries[start : start + rows]
                chosen = slice(start, start + rows)
                if bool((part < 0).any()):
                    chosen = (part >= 0).nonzero().flatten() + start
                    part = queries[chosen]
                if len(part):
                    yield part, keys[real] if padded else keys, weights(chosen), real if padded else None, (block, chosen)

    def __matmul__(self, x: Tensor) -> Tensor:
        """`A @ x`: what each query gathers.

        Args:
            x: `(B, 1|heads, K, C)`.

        Returns:
            `(B, heads, Q, C)`.
        """
        batch, heads, queries, keys = self.shape
        x = self._checked(x, keys, axis=2, name="x").to(self.dtype)
        out = torch.zeros(batch, heads, queries, x.shape[-1], dtype=self.dtype, device=self.device)
        with exact(self.device):
            for tile in self._tiles():
                out[:, :, tile.queries] = tile.weights @ (x if self.key_index is None else x[:, :, tile.keys])
        return out

    def __rmatmul__(self, r: Tensor) -> Tensor:
        """`r @ A`: how much weighted queries draw from each key.

        Args:
            r: `(B, 1|heads, C, Q)`.

        Returns:
            `(B, heads, C, K)`.
        """
        return self.pull(r)

    def pull(self, r: Tensor, implementation: Implementation = "tiles") -> Tensor:
        """`r @ A` by a chosen implementation; both give the same numbers.

        Args:
            r: `(B, 1|heads, C, Q)` weights of the queries.
            implementation: `tiles`: row blocks of `A`, any device, any bias. `reversed`: one fused attention call with keys in
                the place of queries; up to head-dim channels for one price, softmax operators only.

        Returns:
            `(B, heads, C, K)`.

        Raises:
            OptionError: If the implementation is unknown or does not fit this operator.
        """
        if implementation != "tiles":
            raise OptionError(f"r @ A of a {type(self).__name__} has one implementation, 'tiles', got {implementation!r}.")
        batch, heads, queries, keys = self.shape
        r = self._checked(r, queries, axis=3, name="r").to(self.dtype)
        out = torch.zeros(batch, heads, r.shape[2], keys, dtype=self.dtype, device=self.device)
        with exact(self.device):
            for tile in self._tiles(max(ROWS, _SMALL // (batch * heads * keys))):
                whole = self.query_index is None and len(tile.queries) == queries
                part = (r if whole else r[..., tile.queries]).expand(batch, heads, -1, -1) @ tile.weights
                if self.key_index is None:
                    out += part
                else:
                    out.index_add_(3, tile.keys, part)
        return out

    def rows(self, queries: Tensor) -> Tensor:
        """Whole rows of `A`.

        Args:
            queries: `(len,)` tokens in canonical order.

        Returns:
            `(B, heads, len, K)`.
        """
        queries = torch.as_tensor(queries, device=self.device)
        if self.query_index is None and self.key_index is None:
            return self._block(0)(queries)
        out = torch.zeros(*self.shape[:2], len(queries), self.shape[3], dtype=self.dtype, device=self.device)
        for tile in self._tiles():
            here, there = (queries[:, None] == tile.queries).nonzero(as_tuple=True)
            out[:, :, here[:, None], tile.keys] = tile.weights[:, :, there]
        return out

    def dense(self) -> Tensor:
        """All of `A`: `(B, heads, Q, K)`; memory grows with the square of the tokens."""
        return self.rows(torch.arange(self.shape[2], device=self.device))

    def leaked(self) -> Tensor:
        """The part of each query's attention that went to padding: `(B, heads, Q)`, zero without padding."""
        out = torch.zeros(self.shape[:3], dtype=self.dtype, device=self.device)
        if self.key_index is not None and bool((self.key_index < 0).any()):
            for queries, _, weights, real, _ in self._raw_tiles(ROWS, scratch=True):
                if real is not None:
                    out[:, :, queries] = weights.sum(-1) - weights[..., real].sum(-1)
        return out

    def _checked(self, x: Tensor, length: int, axis: int, name: str) -> Tensor:
        batch, heads = self.shape[:2]
        if x.ndim != 4 or x.shape[0] not in (1, batch) or x.shape[1] not in (1, heads) or x.shape[axis] != length:
            wanted = "(B, 1|heads, K, C)" if axis == 2 else "(B, 1|heads, C, Q)"
            raise ShapeError(f"{name} must be {wanted} for A of shape {self.shape}, got {tuple(x.shape)}. Add the missing axes.")
        return x


def _runs(tokens: Tensor, length: int) -> Sequence[slice | Tensor]:
    """The positions of real tokens in runs of this length; slices where none is padding."""
    real = (tokens >= 0).nonzero().flatten()
    if len(real) < len(tokens):
        return torch.split(real, length)
    return [slice(start, start + length) for start in range(0, len(tokens), length)]


def exact(device: torch.device) -> contextlib.ExitStack:
    """No autograd, and no autocast: weights rebuilt in bfloat16 move by 3e-3."""
    stack = contextlib.ExitStack()
    if torch.is_grad_enabled():
        stack.enter_context(torch.no_grad())
    if torch.is_autocast_enabled(device.type):
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def computing(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, if weights can be computed in it.

    Raises:
        OptionError: If it is neither float32 nor float64.
    """
    if dtype not in (torch.float32, torch.float64):
        raise OptionError(f"dtype must be torch.float32 or torch.float64, got {dtype}.")
    return dtype


def token_counts(
    query_index: Tensor | None, key_index: Tensor | None, rows: tuple[int, int], columns: tuple[int, int]
) -> tuple[int, int]:
    """Number of query and key tokens; checks the indices against the blocks `(blocks, tokens)`."""
    if (query_index is None) != (key_index is None):
        raise ShapeError("query_index and key_index must be given together. Pass both.")
    if query_index is None or key_index is None:
        return rows[1], columns[1]
    for index, expected in ((query_index, rows), (key_index, columns)):
        if tuple(index.shape) != expected:
            raise ShapeError(f"an index must be (blocks, tokens) = {expected}, got {tuple(index.shape)}.")
    return int(query_index.max()) + 1, int(key_index.max()) + 1
