"""Norm-based attention: weights times the length of the vectors that they weigh."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from visattn.errors import OptionError
from visattn.maps import AttentionMap
from visattn.methods.from_attention.attention import chosen_records
from visattn.methods.from_attention.recursion import Rows, own_entries
from visattn.methods.method import Method, needs
from visattn.methods.queries import Query, weights_of
from visattn.methods.result import to_map
from visattn.methods.selection import spatial_refusal
from visattn.operators import Tile
from visattn.records import AttentionRecord, Recording


def norm_attention(
    recording: Recording,
    *,
    layer: int | str = -1,
    heads: bool = False,
    add_residual: bool = False,
    query: Query = "auto",
    dtype: torch.dtype = torch.float32,
) -> AttentionMap:
    """Size of what each patch gives to the query: attention counts only as far as the vector that it lets through is long.

    With `f_h(x_j) = v_j^h W_O^h` the value is `||sum_h A_ij^h f_h(x_j)||`, in the units of the residual stream.

    Args:
        recording: Attention with values: `capture(model, values=True)`.
        layer: Position among the layers, or dotted name.
        heads: Keep heads apart: `A_ij^h ||f_h(x_j)||`.
        add_residual: Add what the query's own token brings along the residual path, `x_i`, to its own vector. The class token is not
            drawn, so this changes maps of patch queries only.
        query: See `visattn.methods.QUERY_SPELLINGS`; several tokens are a weighted mean of sizes.
        dtype: float64 computes in double precision.

    Returns:
        Map with axes `batch` and `head` (if `heads`); non-negative, not normalized.

    Raises:
        OptionError: If values or what follows the heads are not known, or the layer or query does not exist.

    Reference:
        Kobayashi et al., "Attention is Not Only a Weight", EMNLP 2020, arXiv:2004.10102; with `add_residual`, "Incorporating Residual
        and Normalization Layers into Analysis of Masked Language Models", EMNLP 2021, arXiv:2109.07152 (AttnRes-N: vision
        transformers normalize before attention, so no normalization lies between). The scale of a block's layer is part of `W_O`.
    """
    if heads and add_residual:
        raise OptionError("the residual path belongs to no head. Leave out heads=True or add_residual=True.")
    record = chosen_records(recording, layer, query, 0)[0]
    rows = head_norms(record, dtype) if heads else norm_rows(record, dtype, residual=add_residual)
    weights, chosen = weights_of(query, record.queries, recording.reads, record.operator.device)
    weights = weights[:, 0].to(dtype)  # (B or 1, 1, Q)
    shape = record.operator.shape
    out = torch.zeros(shape[0], shape[1] if heads else 1, shape[3], dtype=dtype, device=record.operator.device)
    for tile in record.operator.to(dtype).tiles(scratch=True):
        mine = weights[..., tile.queries]
        if mine.any():
            sized = rows(tile)  # (B, [heads,] q, K)
            out.index_add_(2, tile.keys, (mine[:, None] @ sized)[:, :, 0] if heads else mine @ sized)
    values = out.reshape(shape[0], -1, len(record.keys))
    return to_map(
        recording,
        "norm_attention",
        "norm of attention",
        values if heads else values[:, 0],
        record.keys,
        {"layer": record.layer, "heads": heads, "add_residual": add_residual, "query": chosen},
        axes=["head"] if heads else [],
        labels={"head": tuple(str(i) for i in range(shape[1]))} if heads else None,
    )


class _Vectors(NamedTuple):
    """What a layer's heads let through: values `(B, heads, K, d)` and the projection `(heads, d, D)` behind them."""

    value: Tensor
    projection: Tensor

    def project(self, mixed: Tensor) -> Tensor:
        """`(B, n, D)` of values mixed by each head, `(B, heads, n, d)`."""
        return mixed.transpose(1, 2).flatten(2) @ self.projection.flatten(0, 1)


def _vectors(record: AttentionRecord, dtype: torch.dtype) -> _Vectors:
    if record.value is None:
        raise OptionError("values were not recorded. Use capture(model, values=True).")
    if record.output_weight is None:
        raise OptionError(f"{record.layer}: the projection behind its heads is not known. Use method 'attention'.")
    if record.value.ndim != 4:
        raise OptionError(f"{record.layer}: norms are defined for attention over all tokens, not in windows. Use 'attention'.")
    heads, dim = record.value.shape[1], record.value.shape[3]
    projection = record.output_weight.to(dtype).T.reshape(heads, dim, -1)
    return _Vectors(record.value.to(dtype), projection)


def head_norms(record: AttentionRecord, dtype: torch.dtype) -> Rows:
    """`(B, heads, q, K)`: `A_ij^h ||f_h(x_j)||`."""
    gram = _gram(_vectors(record, dtype))
    sizes = gram.diagonal(dim1=2, dim2=3).clamp_min(0).sqrt().transpose(1, 2)  # (B, heads, K)
    return lambda tile: tile.weights * sizes[:, :, None, tile.keys]


def norm_rows(record: AttentionRecord, dtype: torch.dtype, *, residual: bool = False) -> Rows:
    """`(B, q, K)`: `||sum_h A_ij^h f_h(x_j)||` by `a G_j a` with the products of heads `G_j`, so no vector is made for a pair.

    With `residual` a token's own entry is `||sum_h A_ii^h f_h(x_i) + x_i||`.
    """
    vectors = _vectors(record, dtype)
    gram = _gram(vectors).permute(2, 3, 0, 1).to(dtype).contiguous()  # (heads, heads, B, K)
    stream = _residual_of(record).to(dtype) if residual else None

    def rows(tile: Tile) -> Tensor:
        size = torch.zeros_like(tile.weights[:, 0])
        for h in range(gram.shape[0]):  # the sum over pairs, each taken once; whole tiles, as the axis of heads is short
            partial = tile.weights[:, h] * gram[h, h][:, None, tile.keys]
            for g in range(h):
                partial.addcmul_(tile.weights[:, g], gram[h, g][:, None, tile.keys], value=2)
            size.addcmul_(tile.weights[:, h], partial)
        sizes = size.clamp_min_(0).sqrt_()
        if stream is not None:
            here, there = own_entries(tile)
            own = tile.weights[:, :, here, there, None] * vectors.value[:, :, tile.keys[there]]
            sizes[:, here, there] = (vectors.project(own) + stream[:, tile.queries[here]]).norm(dim=-1)
        return sizes

    return rows


def mixing_ratio(record: AttentionRecord, dtype: torch.dtype) -> Tensor:
    """`(B, Q)`: the size of what a token takes from others over that plus the size of what it keeps of itself, in [0, 1]."""
    vectors, stream = _vectors(record, dtype), _residual_of(record).to(dtype)
    operator = record.operator.to(dtype)
    ratio = torch.zeros(stream.shape[:2], dtype=dtype, device=stream.device)
    for tile in operator.tiles(scratch=True):
        here, there = own_entries(tile)
        value = vectors.value[:, :, tile.keys]
        own = torch.zeros(*tile.weights.shape[:3], value.shape[-1], dtype=dtype, device=stream.device)
        own[:, :, here] = tile.weights[:, :, here, there, None] * value[:, :, there]
        given = vectors.project(tile.weights @ value - own).norm(dim=-1)
        kept = (vectors.project(own) + stream[:, tile.queries]).norm(dim=-1)
        ratio[:, tile.queries] = given / (given + kept).clamp_min(torch.finfo(dtype).tiny)
    return ratio


def _gram(vectors: _Vectors) -> Tensor:
    """`(B, K, heads, heads)` products of what different heads give of one token, in float64."""
    value, projection = vectors.value.double(), vectors.projection.double()
    between = torch.einsum("hdm,gem->hgde", projection, projection)
    return torch.einsum("bhkd,hgde,bgke->bkhg", value, between, value)


def _residual_of(record: AttentionRecord) -> Tensor:
    if record.residual is None:
        raise OptionError(f"{record.layer}: what its result is added to is not known. Use capture(model, values=True).")
    return record.residual


def _refusal(recording: Recording) -> str | None:
    if reason := spatial_refusal(recording):
        return reason
    known = any(record.output_weight is not None for record in recording if record.keys.grid)
    return None if known else "the projection behind the heads is not known. Use method 'attention'."


METHODS = {
    "norm_attention": Method(function=norm_attention, needs=needs("attention", "values"), accepts=_refusal),
}
