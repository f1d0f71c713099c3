"""Norm-based attention: norms of the weighted value vectors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from visattn._support.language import option
from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.from_attention.attention import chosen_records
from visattn.core.methods.from_attention.recursion import Rows, own_entries
from visattn.core.methods.method import Method, needs
from visattn.core.methods.queries import Query, weights_of
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import spatial_refusal
from visattn.core.operators import Tile
from visattn.core.records import AttentionRecord, Recording
from visattn.errors import OptionError


@in_own_modes
def norm_attention(
    recording: Recording,
    *,
    layer: int | str = -1,
    keep_heads: bool = False,
    add_residual: bool = False,
    query: Query = "auto",
    dtype: torch.dtype = torch.float32,
) -> AttentionMap:
    """Compute norm-based attention: the norm of the vector that each patch contributes to the query.

    With `f_h(x_j) = v_j^h W_O^h`, the value is `||sum_h A_ij^h f_h(x_j)||`, in the units of the residual stream. A high attention weight
    thus has little effect if its value vector is short.

    Args:
        recording: Attention with values: `capture(model, values=True)`.
        layer: Index of the layer, or its dotted name.
        keep_heads: Keep heads separate, with values `A_ij^h ||f_h(x_j)||`.
        add_residual: Add the query's residual vector `x_i` to the vector that it contributes to itself. The class token is not drawn,
            so this only affects maps of patch queries.
        query: See `visattn.methods.QUERY_SPELLINGS`. For several tokens, the norms are averaged by weight.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with axes `batch` and `head` (if `keep_heads`); non-negative and not normalized.

    Raises:
        OptionError: If values or the output projection are not known, or the layer or query does not exist.

    Reference:
        Kobayashi et al., "Attention is Not Only a Weight", EMNLP 2020, arXiv:2004.10102; with `add_residual`, "Incorporating Residual
        and Normalization Layers into Analysis of Masked Language Models", EMNLP 2021, arXiv:2109.07152 (AttnRes-N:
        vision transformers normalize before attention, so no normalization follows). `W_O` includes the block's layer scale.
    """
    if keep_heads and add_residual:
        raise OptionError(
            f"the residual vector belongs to no head. Leave out {option('keep_heads', True)} or {option('add_residual', True)}."
        )
    record = chosen_records(recording, layer, query, 0)[0]
    rows = head_norms(record, dtype) if keep_heads else norm_rows(record, dtype, residual=add_residual)
    weights, chosen = weights_of(query, record.queries, recording.reading, record.operator.device)
    weights = weights[:, 0].to(dtype)  # (B or 1, 1, Q)
    shape = record.operator.shape
    out = torch.zeros(shape[0], shape[1] if keep_heads else 1, shape[3], dtype=dtype, device=record.operator.device)
    for tile in record.operator.to(dtype).tiles(scratch=True):
        mine = weights[..., tile.queries]
        if mine.any():
            sized = rows(tile)  # (B, [heads,] q, K)
            out.index_add_(2, tile.keys, (mine[:, None] @ sized)[:, :, 0] if keep_heads else mine @ sized)
    values = out.reshape(shape[0], -1, len(record.keys))
    return to_map(
        recording,
        "norm_attention",
        "norm of attention",
        values if keep_heads else values[:, 0],
        record.keys,
        {"layer": record.layer, "keep_heads": keep_heads, "add_residual": add_residual, "query": chosen},
        axes=["head"] if keep_heads else [],
        labels={"head": tuple(str(i) for i in range(shape[1]))} if keep_heads else None,
        queries=record.queries,
    )


class _Vectors(NamedTuple):
    """Values `(B, heads, K, d)` of a layer, and its output projection `(heads, d, D)`."""

    value: Tensor
    projection: Tensor

    def project(self, mixed: Tensor) -> Tensor:
        """Project the attention output of the heads, `(B, heads, n, d)`, to `(B, n, D)`."""
        return mixed.transpose(1, 2).flatten(2) @ self.projection.flatten(0, 1)


def _vectors(record: AttentionRecord, dtype: torch.dtype) -> _Vectors:
    if record.kind == "sampled":
        raise OptionError(f"{record.layer}: norms are defined for attention over tokens, not over points. Use 'attention'.")
    if record.value is None:
        raise OptionError("values were not recorded. Use capture(model, values=True).")
    if record.output_weight is None:
        raise OptionError(f"{record.layer}: its output projection is not known. Use method 'attention'.")
    if record.value.ndim != 4:
        raise OptionError(f"{record.layer}: norms are defined for attention over all tokens, not in windows. Use 'attention'.")
    heads, dim = record.value.shape[1], record.value.shape[3]
    projection = record.output_weight.to(dtype).T.reshape(heads, dim, -1)
    return _Vectors(record.value.to(dtype), projection)


def head_norms(record: AttentionRecord, dtype: torch.dtype) -> Rows:
    """Return a function from a tile to `A_ij^h ||f_h(x_j)||`, `(B, heads, q, K)`."""
    gram = _gram(_vectors(record, dtype))
    sizes = gram.diagonal(dim1=2, dim2=3).clamp_min(0).sqrt().transpose(1, 2).to(dtype)  # (B, heads, K)
    return lambda tile: tile.weights * sizes[:, :, None, tile.keys]


def norm_rows(record: AttentionRecord, dtype: torch.dtype, *, residual: bool = False) -> Rows:
    """Return a function from a tile to `||sum_h A_ij^h f_h(x_j)||`, `(B, q, K)`.

    The squared norm is `a G_j a`, where `a` are the weights of the heads and `G_j` is their Gram matrix, so no vector is computed for a
    pair of tokens. With `residual`, a token's own entry is `||sum_h A_ii^h f_h(x_i) + x_i||`.
    """
    vectors = _vectors(record, dtype)
    gram = _gram(vectors).permute(2, 3, 0, 1).to(dtype).contiguous()  # (heads, heads, B, K)
    stream = _residual_of(record).to(dtype) if residual else None

    def rows(tile: Tile) -> Tensor:
        size = torch.zeros_like(tile.weights[:, 0])
        for h in range(gram.shape[0]):  # loop over pairs of heads, since there are few of them
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
    """Compute the mixing ratio `(B, Q)` in [0, 1]: the norm of what a token receives from others, over that plus what it keeps."""
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
    """Compute the Gram matrix of the heads' projected values for each token, `(B, K, heads, heads)`, in float64."""
    value, projection = vectors.value.double(), vectors.projection.double()
    between = torch.einsum("hdm,gem->hgde", projection, projection)
    return torch.einsum("bhkd,hgde,bgke->bkhg", value, between, value)


def _residual_of(record: AttentionRecord) -> Tensor:
    if record.residual is None:
        raise OptionError(f"{record.layer}: the input of its residual connection is not known. Use capture(model, values=True).")
    return record.residual


def _refusal(recording: Recording) -> str | None:
    if reason := spatial_refusal(recording):
        return reason
    known = any(record.output_weight is not None for record in recording if record.keys.grid)
    return None if known else "the output projection is not known. Use method 'attention'."


METHODS = {
    "norm_attention": Method(function=norm_attention, needs=needs("attention", "values"), accepts=_refusal),
}
