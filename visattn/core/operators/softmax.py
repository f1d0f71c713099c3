"""Softmax attention, rebuilt from the model's query and key."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from visattn._support.types import Implementation
from visattn.core.operators.fused import fused_attention
from visattn.core.operators.operator import PIECE, Operator, Tile, computing, exact, token_counts
from visattn.errors import OptionError, ShapeError

_LOG2_E = math.log2(math.e)
_FEW, _MANY = 1 << 20, 1 << 26  # numbers of keys that are copied to save launches, on a CPU and on a GPU


class SoftmaxOperator(Operator):
    """Softmax attention `A = softmax(scale * Q K^T + bias)` over the keys of a block."""

    batched = "query", "key", "bias", "lse"

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        bias: Tensor | None = None,
        scale: float | None = None,
        query_index: Tensor | None = None,
        key_index: Tensor | None = None,
        *,
        lse: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Store the operands; nothing is computed yet.

        Args:
            query: `(B, heads, q, d)`, or `(B, heads, blocks, q, d)` with indices.
            key: `(B, heads, k, d)` or `(B, heads, blocks, k, d)`.
            bias: Bias added to the scaled scores; broadcasts to `(B, heads, q, k)` or `(B, heads, blocks, q, k)`. `-inf` masks a key;
                a row that is masked entirely has zero weights.
            scale: Scale of the scores; `d ** -0.5` by default.
            query_index: `(blocks, q)` token index of each row; -1 is padding. Pass it together with `key_index`.
            key_index: `(blocks, k)` token index of each column; -1 is padding.
            lse: Log-sum-exp of the rows in float32, `(B, heads, blocks, q)` or `(B, heads, q)`, if the model's own kernel returned it.
            dtype: Type in which weights are computed, float32 or float64.

        Raises:
            ShapeError: If the shapes do not fit.
            OptionError: If `dtype` is neither float32 nor float64.
        """
        (*lead, queries, dim), (*others, keys, key_dim) = query.shape, key.shape
        dims = len(lead)
        if dim != key_dim or lead != others or dims not in (2, 3):
            raise ShapeError(
                f"query and key must be (B, heads, q, d) and (B, heads, k, d), got {tuple(query.shape)} and {tuple(key.shape)}."
            )
        if dims == 3 and query_index is None:
            raise ShapeError("blocks (5 axes) need query_index and key_index, the token index of each row and column. Pass both.")
        if bias is not None:
            bias = bias.reshape(*(1,) * (query.ndim - bias.ndim), *bias.shape)
            if any(have not in (1, want) for have, want in zip(bias.shape, (*lead, queries, keys), strict=True)):
                raise ShapeError(f"bias must broadcast to {(*lead, queries, keys)}, got {tuple(bias.shape)}.")
        if dims == 2:
            lead, query, key = [*lead, 1], query.unsqueeze(2), key.unsqueeze(2)
            bias = None if bias is None else bias.unsqueeze(2)
            lse = None if lse is None else lse.unsqueeze(2)
        self.query, self.key, self.bias, self.lse, self.dtype = query, key, bias, lse, computing(dtype)
        self.scale = dim**-0.5 if scale is None else scale
        self.query_index, self.key_index = query_index, key_index
        batch, heads, blocks = lead
        self.shape = batch, heads, *token_counts(query_index, key_index, (blocks, queries), (blocks, keys))

    @property
    def device(self) -> torch.device:
        """Device on which the operator computes."""
        return self.query.device

    def queries(self) -> Tensor:
        """Return the query vectors, `(B, heads, Q, d)`, without padding; see `Operator.queries`."""
        return unblocked(self.query, self.query_index, self.shape[2])

    def keys(self) -> Tensor:
        """Return the key vectors, `(B, heads, K, d)`, without padding; see `Operator.queries`."""
        return unblocked(self.key, self.key_index, self.shape[3])

    def to(self, dtype: torch.dtype) -> SoftmaxOperator:
        """Return the operator with another compute type; float64 recomputes the log-sum-exp from query and key."""
        if dtype == self.dtype:
            return self
        changed = copy.copy(self)
        changed.dtype = computing(dtype)
        return changed

    def columns(self, keys: Tensor) -> Tensor:
        """Return whole columns of `A`; see `Operator.columns`. A known log-sum-exp makes the others unnecessary."""
        lse = self._trusted_lse()
        if lse is None or self.bias is not None or self.query_index is not None:
            return super().columns(keys)
        with exact(self.device):
            chosen = self.key[:, :, 0, torch.as_tensor(keys, device=self.device)] * self.scale  # fewer than the queries
            scores = self.query[:, :, 0] @ chosen.mT
            return _exp(scores.sub_(lse[:, :, 0, :, None]))

    def _block(self, block: int, scratch: bool = False) -> Callable[[slice | Tensor], Tensor]:
        batch, heads, dim = *self.query.shape[:2], self.query.shape[-1]
        query = self.query[:, :, block]
        key = self.key[:, :, block].to(self.dtype).reshape(batch * heads, -1, dim).transpose(1, 2)
        bias = None if self.bias is None else self.bias[:, :, block if self.bias.shape[2] > 1 else 0]
        known = self._trusted_lse()
        buffer = torch.empty(0, device=self.device)

        def weights(rows: slice | Tensor) -> Tensor:
            nonlocal buffer
            with exact(self.device):
                part = (query[:, :, rows].to(self.dtype) * self.scale).reshape(batch * heads, -1, dim)
                count = part.shape[1]
                if not scratch or buffer.numel() < batch * heads * count * key.shape[2]:
                    buffer = torch.empty(batch * heads, count, key.shape[2], dtype=self.dtype, device=self.device)
                out = torch.bmm(part, key, out=buffer[:, :count]).view(batch, heads, count, -1)
                if bias is not None:
                    out += bias[:, :, rows] if bias.shape[2] > 1 else bias
                if known is not None:
                    return _exp(out.sub_(known[:, :, block, rows, None]))
                limits = torch.finfo(self.dtype)
                _exp(out.sub_(out.amax(-1, keepdim=True).clamp_min_(limits.min)))  # a row that is masked entirely is all -inf
                return out.div_(out.sum(-1, keepdim=True).clamp_min_(limits.tiny))

        return weights

    def _trusted_lse(self) -> Tensor | None:
        """Return the kernel's log-sum-exp if query and weights are float32, so that it is as exact as recomputing it."""
        return self.lse if self.dtype == self.query.dtype == torch.float32 else None

    def pull(self, r: Tensor, implementation: Implementation = "tiles") -> Tensor:
        """Compute `r @ A`; see `Operator.pull`."""
        if implementation == "tiles":
            lse = self._trusted_lse()
            if lse is not None and self.bias is None and self.query_index is None:
                return self._pull_known(r, lse[:, :, 0])
            return super().pull(r)
        if implementation != "reversed":
            raise OptionError(f"implementation must be 'tiles' or 'reversed', got {implementation!r}.")
        r = self._checked(r, self.shape[2], axis=3, name="r").to(self.dtype)
        if self.scale == 0:
            raise OptionError("implementation='reversed' divides by the scale, which is 0. Use 'tiles'.")
        dim = self.query.shape[-1]
        with exact(self.device):
            return torch.cat([self._pull_reversed(part) for part in torch.split(r, dim, dim=2)], dim=2)

    def _pull_known(self, r: Tensor, lse: Tensor) -> Tensor:
        """Compute `r @ A` from a known log-sum-exp, `A = exp([scale * Q, -lse] [K, 1]^T)`.

        The log-sum-exp becomes one more dimension of the product. Tiles then need not hold whole rows and stay in the CPU cache.
        """
        batch, heads, rows, columns = self.shape
        r = self._checked(r, rows, axis=3, name="r").to(self.dtype).expand(batch, heads, -1, -1).flatten(0, 1)
        out = torch.zeros(batch * heads, r.shape[1], columns, dtype=self.dtype, device=self.device)
        for some, across, weights in self._known_pieces(lse):
            with exact(self.device):
                out[..., across] += torch.bmm(r[..., some], weights)
        return out.view(batch, heads, -1, columns)

    def pieces(self) -> Iterator[Tile]:
        """See `Operator.pieces`."""
        lse = self._trusted_lse()
        if lse is None or self.bias is not None or self.query_index is not None:
            yield from super().pieces()
            return
        queries, keys = (torch.arange(count, device=self.device) for count in self.shape[2:])
        for rows, columns, weights in self._known_pieces(lse[:, :, 0]):
            grad = None if self.gradient is None else self.gradient.part(0, rows, columns, self.dtype)
            yield Tile(queries[rows], keys[columns], weights.view(*self.shape[:2], *weights.shape[1:]), grad)

    def _known_pieces(self, lse: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield rows, columns and weights `(B * heads, rows, columns)`. Each piece overwrites the weights of the one before."""
        batch, heads, rows, columns = self.shape
        with exact(self.device):
            query = torch.cat([self.query[:, :, 0] * self.scale, -lse[..., None]], -1).flatten(0, 1)
            key = self.key[:, :, 0].flatten(0, 1)
            key = torch.cat([key, torch.ones_like(key[..., :1])], -1).transpose(1, 2)
            buffer = torch.empty(batch * heads * PIECE[0] * PIECE[1], dtype=self.dtype, device=self.device)
        for i, j in product(range(0, rows, PIECE[0]), range(0, columns, PIECE[1])):
            some, across = slice(i, i + PIECE[0]), slice(j, j + PIECE[1])
            with exact(self.device):
                part, keys = query[:, some], key[..., across]
                tile = buffer[: part.shape[0] * part.shape[1] * keys.shape[2]].view(*part.shape[:2], -1)
                _exp(torch.bmm(part, keys, out=tile))
            yield some, across, tile

    def _pull_reversed(self, r: Tensor) -> Tensor:
        """Compute `(r @ A)[j] = exp(m_j) * sum_i softmax_i(scale k_j.q_i - lse_i) r_i`; `m_j` is the log-sum-exp over queries `i`."""
        batch, heads, blocks, rows, dim = self.query.shape
        columns, channels = self.key.shape[3], r.shape[2]
        query = self.query.to(self.dtype).reshape(batch, heads * blocks, rows, dim)
        key = self.key.to(self.dtype).reshape(batch, heads * blocks, columns, dim)
        bias = None
        if self.bias is not None:
            bias = self.bias.to(self.dtype).expand(batch, heads, blocks, rows, columns).reshape(batch, -1, rows, columns)
        known = self._trusted_lse()
        lse = fused_attention(query, key, key, bias, self.scale)[1] if known is None else known.reshape(batch, -1, rows)
        masked = lse == -math.inf
        width = -(-(dim + 1) // 8) * 8  # one more dimension for the log-sum-exp; kernels need multiples of 8
        as_queries = _widen(key, width, torch.ones_like(key[..., :1]))
        as_keys = _widen(query, width, lse.masked_fill(masked, 0)[..., None] / -self.scale)
        index = torch.arange(rows, device=self.device)[None] if self.query_index is None else self.query_index
        values = r.expand(batch, heads, -1, -1)[..., index.clamp_min(0)]  # (B, heads, C, blocks, q)
        values = values.masked_fill(index < 0, 0).permute(0, 1, 3, 4, 2).reshape(batch, heads * blocks, rows, channels)
        values = _widen(values.masked_fill(masked[..., None], 0), width)
        out, total = fused_attention(as_queries, as_keys, values, None if bias is None else bias.mT, self.scale)
        out = torch.where(total[..., None] == -math.inf, 0, out * total.exp()[..., None])[..., :channels]
        out = out.reshape(batch, heads, blocks * columns, channels).transpose(2, 3)
        if self.key_index is None:
            return out
        keys = self.key_index.flatten()
        result = torch.zeros(batch, heads, channels, self.shape[3], dtype=self.dtype, device=self.device)
        return result.index_add_(3, keys[keys >= 0], out[..., keys >= 0])


def unblocked(vectors: Tensor, index: Tensor | None, count: int) -> Tensor:
    """Reorder vectors `(B, heads, blocks, n, d)` to `(B, heads, count, d)` by the token index of each; -1 is padding."""
    if index is None:
        return vectors[:, :, 0]
    real = index >= 0
    out = vectors.new_zeros(*vectors.shape[:2], count, vectors.shape[-1])
    out[:, :, index[real]] = vectors[:, :, real]
    return out


def _exp(x: Tensor) -> Tensor:
    """Compute `exp(x)` in place as a power of 2, since PyTorch's exp2 is faster than its exp on a CPU.

    The exponent is scaled here instead of in the query: scores of sharp heads are in the hundreds, where scaling would add rounding.
    """
    return x.mul_(_LOG2_E).exp2_()


def _widen(x: Tensor, width: int, extra: Tensor | None = None) -> Tensor:
    """Append `extra` and then zeros to the last axis of `x`, up to `width`."""
    parts = [x] if extra is None else [x, extra.to(x.dtype)]
    missing = width - sum(part.shape[-1] for part in parts)
    return torch.cat([*parts, x.new_zeros(*x.shape[:-1], missing)], dim=-1)


def stacked(operators: Sequence[Operator], rows: Tensor) -> SoftmaxOperator | None:
    """Return some rows of several operators as one, whose batch is theirs one after another, for one launch instead of many.

    None if they are not softmax attention of one shape without bias and blocks, or if the copy of their keys costs more than it saves.
    """
    softmaxes = [one for one in operators if type(one) is SoftmaxOperator and one.bias is None and one.query_index is None]
    alike = {(one.query.shape, one.key.shape, one.query.dtype, one.device, one.scale, one.dtype) for one in softmaxes}
    if len(softmaxes) < len(operators) or len(alike) != 1:
        return None
    first = softmaxes[0]
    if len(softmaxes) * first.key.numel() > (_FEW if first.device.type == "cpu" else _MANY):
        return None
    query = torch.cat([one.query[:, :, 0, rows.to(first.device)] for one in softmaxes])
    return SoftmaxOperator(query, torch.cat([one.key[:, :, 0] for one in softmaxes]), scale=first.scale, dtype=first.dtype)
