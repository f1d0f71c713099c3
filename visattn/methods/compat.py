"""Other tools' numbers, with their errors: to compare with published pictures, never to explain a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from visattn._types import Fusion
from visattn.maps import AttentionMap
from visattn.methods._select import chain, described, graded
from visattn.records import Recording

__all__ = ["vit_explain"]


def vit_explain(
    recording: Recording, *, discard: float = 0.9, fusion: Fusion = "mean", gradients: bool = False, shuffled: bool = False
) -> AttentionMap:
    """What vit-explain draws (commit 15a81d3). It builds whole matrices.

    Known errors that are kept: columns, not rows, are divided by the row sums; the smallest entries are discarded in the first
    image of a batch only, those of the class token with them; the result is divided by its maximum.

    Args:
        recording: Self-attention of every layer whose first token is the class token.
        discard: Share of the smallest entries that become 0.
        fusion: How heads are merged; of no use with `gradients`.
        gradients: Its gradient rollout, of a recording with the gradient of a score.
        shuffled: With `gradients`: as published, layer `l` is multiplied with the gradient of layer `L - 1 - l`.

    Returns:
        Map with the axis `batch`; the class token's row, over its maximum.
    """
    records = chain(graded(recording) if gradients else recording)
    layout = records[0].keys
    attention = [record.operator.dense() for record in records]
    if gradients:
        slopes = [
            _gradient(record.operator.gradient_tiles(), weights) for record, weights in zip(records, attention, strict=True)
        ]
        pairs = zip(attention, slopes[::-1] if shuffled else slopes, strict=True)
        layers = [(weights * slope).mean(1).clamp(min=0) for weights, slope in pairs]
    else:
        layers = [getattr(weights, {"max": "amax", "min": "amin"}.get(fusion, fusion))(1) for weights in attention]
    result = torch.eye(len(layout), device=layers[0].device)
    for layer in layers:
        flat = layer.flatten(1)
        least = flat.topk(int(flat.shape[1] * discard), largest=False).indices
        least = least if gradients else least[least != 0]
        flat[0, least] = 0
        mixed = (layer + torch.eye(len(layout), device=layer.device)) / 2
        result = (mixed / mixed.sum(-1)) @ result
    values = result[:, 0, len(layout.prefix) :]
    values = (values / values.amax(1, keepdim=True)).reshape(-1, *layout.grid)
    provenance = described(
        recording,
        "compat.vit_explain",
        warnings=("made with the known errors of vit-explain, to compare with its pictures",),
        discard=discard,
        fusion=fusion,
        gradients=gradients,
        shuffled=shuffled,
    )
    return AttentionMap(values, ("batch",), layout, {}, "rollout", provenance)


def _gradient(tiles: Iterator[tuple[Tensor, Tensor, Tensor]], like: Tensor) -> Tensor:
    out = torch.zeros_like(like)
    for queries, keys, grad in tiles:
        out[:, :, queries[:, None], keys] = grad
    return out
