"""Base class of attention operators. Subclasses implement one primitive, blocks of rows; all products follow from it."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from visattn._support.reprs import brief
from visattn._support.types import Implementation
from visattn.core.operators.images import of_image
from visattn.core.operators.weight_gradients import Gradient
from visattn.errors import OptionError, ShapeError

_SMALL = 1_000_000  # a tile may always hold this many weights, so a short sequence is one tile
PIECE = 192, 768  # queries x keys of a piece: 3.5 MB for 6 heads
ROWS = 128  # query rows of a tile: 17 MB for 6 heads x 128 x 5477 keys


class Tile(NamedTuple):
    """Block of rows of `A`: canonical token indices of its rows and columns, and `(B, heads, queries, keys)` weights and gradients."""

    queries: Tensor
    keys: Tensor
    weights: Tensor
    grad: Tensor | None = None

    def __repr__(self) -> str:
        """Return the fields in short."""
        return brief(self)


class Operator(ABC):
    """Batch of attention matrices `A`, computed in blocks of rows.

    Attributes:
        shape: `(B, heads, Q, K)` in canonical token order.
        query_index: `(blocks, q)` token index of each row; -1 is padding. None for one block in canonical order.
        key_index: `(blocks, k)` token index of each column, in the same form.
        dtype: Type in which weights are computed, float32 or float64.
        gradient: Gradient of a score with respect to `A`, if there is one.
    """

    batched: ClassVar[tuple[str, ...]] = ()  # attributes whose first axis is the batch, or 1

    gradient: Gradient | None = None
    shape: tuple[int, int, int, int]
    query_index: Tensor | None
    key_index: Tensor | None
    dtype: torch.dtype

    def __repr__(self) -> str:
        """Return the kind of operator and its shape."""
        return f"<{type(self).__name__} (B, heads, Q, K) = {tuple(self.shape)}>"

    @abstractmethod
    def _block(self, block: int, scratch: bool = False) -> Callable[[slice | Tensor], Tensor]:
        """Return a function from rows of one block to their `(B, heads, rows, k)` weights, padding included.

        With `scratch`, each result may reuse the memory of the one before, because fresh pages cost more than the arithmetic.
        """

    def block(self, number: int) -> Tensor:
        """Return all weights of one block, `(B, heads, q, k)`, in the block's own order and with padding."""
        return self._block(number)(slice(None))

    def image(self, number: int) -> Self:
        """Return the operator of one image of the batch, on the same memory.

        Raises:
            IndexError: If the batch has no such image.
        """
        batch = self.shape[0]
        if not 0 <= number < batch:
            raise IndexError(f"image {number} of {batch}")
        one = copy.copy(self)
        vars(one).pop("probability", None)  # it was computed for the batch
        for name in self.batched:
            setattr(one, name, of_image(getattr(self, name), number, batch))
        one.gradient = None if self.gradient is None else self.gradient.image(number)
        one.shape = (1, *self.shape[1:])
        return one

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Operator:
        """Return the operator with another compute type, float32 or float64."""

    def with_gradient(self, gradient: Gradient) -> Self:
        """Return the operator with a gradient, which its tiles then include."""
        changed = copy.copy(self)
        changed.gradient = gradient
        return changed

    def pieces(self) -> Iterator[Tile]:
        """Yield all of `A` in blocks that may cover only parts of rows.

        If the log-sum-exp of the rows is known, the blocks are small enough for the CPU cache.

        Yields:
            Tiles. Use each before requesting the next, which may overwrite its weights.
        """
        yield from self._tiles()

    def gradient_pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the gradient alone, in blocks that may cover only parts of rows. No weights are computed.

        Yields:
            Query indices, key indices and `dA`, `(B, heads, queries, keys)`.

        Raises:
            OptionError: If the operator has no gradient.
        """
        if self.gradient is None:
            raise OptionError("the operator has no gradient. Use recording.gradients(score).")
        for block in range(1 if self.query_index is None else len(self.query_index)):
            queries, keys = (
                torch.arange(count, device=self.device) if index is None else index[block]
                for index, count in zip((self.query_index, self.key_index), self.shape[2:], strict=True)
            )
            for rows, columns in product(_runs(queries, PIECE[0]), _runs(keys, PIECE[1])):
                yield queries[rows], keys[columns], self.gradient.part(block, rows, columns, self.dtype)

    @property
    def probability(self) -> bool:
        """True if rows are distributions: non-negative with sum 1, or 0 for rows that are masked entirely."""
        return True

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device on which the operator computes."""

    def tiles(self, rows: int = ROWS, *, scratch: bool = False) -> Iterator[Tile]:
        """Return all of `A` as tiles of up to `rows` queries. Padded rows and columns are left out.

        Args:
            rows: Query rows per tile. A tile holds `B * heads * rows * K` numbers.
            scratch: Let each tile overwrite the weights of the one before, which is faster.

        Returns:
            Iterator over tiles, whose rows cover every query once.

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
        """Yield queries, keys, weights with padded columns, a mask of real columns (None: all), and the block with its rows."""
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
        """Compute `A @ x`, the mean of `x` over the keys, weighted by each query's attention.

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
        """Compute `r @ A`, the attention that each key receives from the weighted queries.

        Args:
            r: `(B, 1|heads, C, Q)`.

        Returns:
            `(B, heads, C, K)`.
        """
        return self.pull(r)

    def pull(self, r: Tensor, implementation: Implementation = "tiles") -> Tensor:
        """Compute `r @ A` with a choice of implementations, which give the same result.

        Args:
            r: `(B, 1|heads, C, Q)` weights of the queries.
            implementation: `tiles` works through row blocks of `A`, on any device and with any bias. `reversed` makes one fused
                attention call with queries and keys exchanged. Its cost is the same for any number of channels up to the head
                dimension; it supports softmax operators only.

        Returns:
            `(B, heads, C, K)`.

        Raises:
            OptionError: If the implementation is unknown or not supported by this operator.
        """
        if implementation != "tiles":
            raise OptionError(f"a {type(self).__name__} computes r @ A only with implementation='tiles', got {implementation!r}.")
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
        """Return whole rows of `A`.

        Args:
            queries: `(len,)` token indices in canonical order.

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

    def columns(self, keys: Tensor) -> Tensor:
        """Return whole columns of `A`.

        Args:
            keys: `(len,)` token indices in canonical order.

        Returns:
            `(B, heads, Q, len)`.
        """
        keys = torch.as_tensor(keys, device=self.device)
        out = torch.zeros(*self.shape[:3], len(keys), dtype=self.dtype, device=self.device)
        for tile in self._tiles():
            here, there = (keys[:, None] == tile.keys).nonzero(as_tuple=True)
            out[:, :, tile.queries[:, None], here] = tile.weights[..., there]
        return out

    def queries(self) -> Tensor:
        """Return the query vectors, `(B, heads, Q, d)`.

        Raises:
            OptionError: If the model computed the weights itself, and queries and keys were not recorded.
        """
        raise OptionError(
            "the model computed these weights itself, and their queries and keys were not recorded. capture(model, values=True) "
            "records them if the weights come from one product of queries and keys."
        )

    def keys(self) -> Tensor:
        """Return the key vectors, `(B, heads, K, d)`; see `queries`."""
        return self.queries()

    def dense(self) -> Tensor:
        """Return all of `A`, `(B, heads, Q, K)`. Memory grows with the square of the number of tokens."""
        return self.rows(torch.arange(self.shape[2], device=self.device))

    def leaked(self) -> Tensor:
        """Return the attention that each query gives to padding, `(B, heads, Q)`; zero without padding."""
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
    """Split the positions of real tokens into runs of this length; they are slices if there is no padding."""
    real = (tokens >= 0).nonzero().flatten()
    if len(real) < len(tokens):
        return torch.split(real, length)
    return [slice(start, start + length) for start in range(0, len(tokens), length)]


def exact(device: torch.device) -> contextlib.ExitStack:
    """Disable autograd and autocast, since weights rebuilt in bfloat16 are off by 3e-3."""
    stack = contextlib.ExitStack()
    if torch.is_grad_enabled():
        stack.enter_context(torch.no_grad())
    if torch.is_autocast_enabled(device.type):
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def computing(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype` after checking that weights can be computed in it.

    Raises:
        OptionError: If it is neither float32 nor float64.
    """
    if dtype not in (torch.float32, torch.float64):
        raise OptionError(f"dtype must be torch.float32 or torch.float64, got {dtype}.")
    return dtype


def token_counts(
    query_index: Tensor | None, key_index: Tensor | None, rows: tuple[int, int], columns: tuple[int, int]
) -> tuple[int, int]:
    """Return the numbers of query and key tokens, after checking the indices against the blocks `(blocks, tokens)`."""
    if (query_index is None) != (key_index is None):
        raise ShapeError("query_index and key_index must be given together. Pass both.")
    if query_index is None or key_index is None:
        return rows[1], columns[1]
    for index, expected in ((query_index, rows), (key_index, columns)):
        if tuple(index.shape) != expected:
            raise ShapeError(f"an index must be (blocks, tokens) = {expected}, got {tuple(index.shape)}.")
    return int(query_index.max()) + 1, int(key_index.max()) + 1
