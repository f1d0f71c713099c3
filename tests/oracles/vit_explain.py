"""Maps of vit-explain, including its errors."""

from __future__ import annotations

import torch
from torch import Tensor

from visattn._support.types import Fusion
from visattn.core.maps import AttentionMap
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import chain, graded
from visattn.core.operators import Operator
from visattn.core.records import Recording


def vit_explain(
    recording: Recording,
    *,
    discard: float = 0.9,
    fusion: Fusion = "mean",
    gradients: bool = False,
    published: bool = True,
    dtype: torch.dtype = torch.float32,
) -> AttentionMap:
    """Reproduce the maps of vit-explain (commit 15a81d3). This builds whole attention matrices.

    These known errors are reproduced. Columns, instead of rows, are divided by the row sums. The smallest entries, including those of
    the class token, are discarded in the first image of a batch only. The result is divided by its maximum.

    Args:
        recording: Self-attention of every layer, with the class token as first token.
        discard: Share of the smallest entries that are set to 0.
        fusion: Fusion of heads: `mean`, `max` or `min`; ignored with `gradients`.
        gradients: Compute the gradient rollout, which needs a recording with the gradient of a score.
        published: With `gradients`, multiply the attention of layer `l` by the gradient of the *scores* before the softmax of layer
            `L - 1 - l`, which is what the published hooks collect. If False, use the attention's own gradient.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`: the class token's row, divided by its maximum.
    """
    records = chain(graded(recording) if gradients else recording)
    layout = records[0].keys
    operators = [record.operator.to(dtype) for record in records]
    attention = [operator.dense() for operator in operators]
    if gradients:
        slopes = [_gradient(operator) for operator in operators]
        if published:
            spoken = [weights * slope for weights, slope in zip(attention, slopes, strict=True)]
            slopes = [one - weights * one.sum(-1, keepdim=True) for weights, one in zip(attention, spoken, strict=True)][::-1]
        layers = [(weights * slope).mean(1).clamp(min=0) for weights, slope in zip(attention, slopes, strict=True)]
    else:
        layers = [getattr(weights, {"max": "amax", "min": "amin"}.get(fusion, "mean"))(1) for weights in attention]
    identity = torch.eye(len(layout), dtype=dtype, device=layers[0].device)
    result = identity
    for layer in layers:
        flat = layer.flatten(1)
        least = flat.topk(int(flat.shape[1] * discard), largest=False).indices
        flat[0, least if gradients else least[least != 0]] = 0
        mixed = (layer + identity) / 2
        result = (mixed / mixed.sum(-1)) @ result
    values = result[:, 0, len(layout.prefix) :]
    return to_map(
        recording,
        "compat.vit_explain",
        "rollout",
        values / values.amax(1, keepdim=True),
        layout,
        {"discard": discard, "fusion": fusion, "gradients": gradients, "published": published},
        warnings=("reproduces known errors of vit-explain, for comparison with its pictures",),
    )


def _gradient(operator: Operator) -> Tensor:
    out = torch.zeros(operator.shape, dtype=operator.dtype, device=operator.device)
    for queries, keys, grad in operator.gradient_pieces():
        out[:, :, queries[:, None], keys] = grad
    return out
