"""Other tools' numbers, with their errors: to compare with published pictures, never to explain a model."""

from __future__ import annotations

import torch
from torch import Tensor

from visattn._support.types import Fusion
from visattn.maps import AttentionMap
from visattn.methods.result import to_map
from visattn.methods.selection import chain, graded
from visattn.operators import Operator
from visattn.records import Recording

__all__ = ["vit_explain"]


def vit_explain(
    recording: Recording,
    *,
    discard: float = 0.9,
    fusion: Fusion = "mean",
    gradients: bool = False,
    published: bool = True,
    dtype: torch.dtype = torch.float32,
) -> AttentionMap:
    """What vit-explain draws (commit 15a81d3). It builds whole matrices.

    Known errors that are kept: columns, not rows, are divided by the row sums; the smallest entries are discarded in the first
    image of a batch only, those of the class token with them; the result is divided by its maximum.

    Args:
        recording: Self-attention of every layer whose first token is the class token.
        discard: Share of the smallest entries that become 0.
        fusion: How heads are merged; of no use with `gradients`.
        gradients: Its gradient rollout, of a recording with the gradient of a score.
        published: With `gradients`: attention of layer `l` is multiplied with the gradient of the *scores* before the softmax of
            layer `L - 1 - l`, which is what the published hooks collect; else with its own gradient.
        dtype: float64 computes in double precision.

    Returns:
        Map with the axis `batch`; the class token's row, over its maximum.
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
        warnings=("made with the known errors of vit-explain, to compare with its pictures",),
    )


def _gradient(operator: Operator) -> Tensor:
    out = torch.zeros(operator.shape, dtype=operator.dtype, device=operator.device)
    for queries, keys, grad in operator.gradient_pieces():
        out[:, :, queries[:, None], keys] = grad
    return out
