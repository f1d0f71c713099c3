"""Attention in few bytes: rows in eight bits, or queries and keys in sixteen, with the largest error measured over all rows.

A page computes the rows again: `low + code * scale` of a row, from its lowest weight to its highest, or `softmax(scale * Q K^T)`. Whatever
exceeds its limit is kept in more bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from visattn._support.language import option
from visattn.core.operators import Operator, SampledOperator, SoftmaxOperator
from visattn.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS_LIMIT, VECTORS_LIMIT = 0.002, 0.01  # largest allowed error of a weight
_BETTER = 1.5  # rows compress to two thirds, vectors hardly at all
_MOST = 255
_LARGEST = 2**31  # weights of a layer
_INDICES = "query_index", "key_index"


@dataclass(frozen=True, eq=False)
class Encoded:
    """Weights of one attention call, encoded.

    Attributes:
        how: `rows`, `softmax` or `sampled`.
        arrays: Arrays by name; what each is stands in `visattn/viewer/src/attention.js`, which decodes them.
        error: Largest difference of a decoded weight from the weight.
        facts: Plain values. `relative` is the largest difference over the largest magnitude of its row; rows in eight bits have none, since
            their scale states how exact they are.
    """

    how: str
    arrays: dict[str, NDArray[Any]]
    error: float
    facts: dict[str, Any]

    def only(self, heads: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Return the arrays of some heads; indices of tokens are those of all heads."""
        return {name: array if name in _INDICES else array[list(heads)] for name, array in self.arrays.items()}


def encoded(operator: Operator) -> Encoded:
    """Encode the weights of an operator of one image."""
    if isinstance(operator, SampledOperator):
        return _with_index(operator, _sampled(operator))
    if isinstance(operator, SoftmaxOperator) and operator.bias is None and operator.query_index is None:
        heads, _, queries, dim = operator.query.shape[1:]
        keys = operator.key.shape[3]
        if heads * queries * keys > _BETTER * 2 * heads * (queries + keys) * dim:
            found = _vectors(operator, torch.float16)
            return found if found.error <= VECTORS_LIMIT else _vectors(operator, torch.float32)
    return _with_index(operator, _rows(operator))


def _vectors(operator: SoftmaxOperator, kind: torch.dtype) -> Encoded:
    """Encode queries and keys, and measure the rows that follow from them."""
    query, key = (x[0, :, 0].float() for x in (operator.query, operator.key))
    key = key - key.mean(1, keepdim=True)  # changes no weight, and leaves smaller numbers, which half precision keeps better
    query, key = query.to(kind), key.to(kind)
    rounded = SoftmaxOperator(query[None].float(), key[None].float(), None, operator.scale, dtype=torch.float64)  # as the page
    error = relative = 0.0
    if kind == torch.float32 and not bool(query.isfinite().all() and key.isfinite().all()):
        raise OptionError(
            "queries or keys are NaN or infinite, so there is nothing to show. Check the model's weights and dtype."
        )
    if bool(query.isfinite().all() and key.isfinite().all()):
        for one, other in zip(operator.tiles(), rounded.tiles(), strict=True):
            error = max(error, float((one.weights - other.weights).abs().max()))
            relative = max(relative, _relative(one.weights, other.weights))
    else:
        error = float("inf")  # the values exceed half precision
    arrays = {"query": query.cpu().numpy(), "key": key.cpu().numpy()}
    facts = {"scale": float(operator.scale), "channels": int(query.shape[-1]), "relative": relative}
    return Encoded("softmax", arrays, error, facts)


def _relative(weights: Tensor, decoded: Tensor) -> float:
    """Return the largest difference of a weight over the largest magnitude of its row."""
    differences = (decoded - weights).abs().amax(-1)
    return float((differences / weights.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)).max())


def _rows(operator: Operator) -> Encoded:
    """Encode the weights of every block: in eight bits by row, else in half or single precision."""
    blocks = 1 if operator.query_index is None else len(operator.query_index)
    if (size := operator.shape[1] * operator.shape[2] * operator.shape[3] // blocks) > _LARGEST:
        raise OptionError(f"a layer has {size:,} weights, too many for a page. Pass a smaller {option('img_size')}.")
    weights = torch.stack([operator.block(block)[0] for block in range(blocks)], 1)  # (heads, blocks, q, k)
    weights = weights.nan_to_num(0)  # rows that are padding
    sizes = {"rows": int(weights.shape[2]), "columns": int(weights.shape[3])}
    if bool((weights >= 0).all()):
        low, high = (side[..., None].float() for side in weights.aminmax(dim=-1))
        scale = (high - low) / _MOST
        codes = ((weights - low) / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp_(0, _MOST)
        error = float((low + codes * scale - weights).abs().max())
        if error <= ROWS_LIMIT:
            arrays = {name: array[..., 0].cpu().numpy() for name, array in (("scale", scale), ("low", low))}
            arrays["codes"] = codes.to(torch.uint8).cpu().numpy()
            return Encoded("rows", arrays, error, sizes)
    half = weights.half()
    error = float((half.float() - weights).abs().max())
    if error <= ROWS_LIMIT:
        return Encoded("rows", {"weights": half.cpu().numpy()}, error, sizes | {"relative": _relative(weights, half.float())})
    return Encoded("rows", {"weights": weights.float().cpu().numpy()}, 0.0, sizes)


def _sampled(operator: SampledOperator) -> Encoded:
    """Encode the cells and shares of sampled points."""
    shares = operator.shares[0].float()
    half = shares.half()
    error = float((half.float() - shares).abs().max()) * operator.cells.shape[-1]  # all entries of a row may share a cell
    kept, error = (half, error) if error <= ROWS_LIMIT else (shares, 0.0)
    arrays = {"cells": _small(operator.cells[0]), "shares": kept.cpu().numpy()}
    return Encoded("sampled", arrays, error, {"rows": int(shares.shape[2]), "points": int(shares.shape[3])})


def _with_index(operator: Operator, found: Encoded) -> Encoded:
    """Add the token numbers of rows and columns, if the operator has blocks."""
    if operator.query_index is not None and operator.key_index is not None:
        found.arrays["query_index"] = operator.query_index.cpu().numpy().astype(np.int32)
        found.arrays["key_index"] = operator.key_index.cpu().numpy().astype(np.int32)
    return found


def _small(indices: Tensor) -> NDArray[Any]:
    """Return indices in the fewest bits."""
    array = indices.cpu().numpy()
    return array.astype(np.uint16 if int(array.max(initial=0)) < 2**16 else np.uint32)
