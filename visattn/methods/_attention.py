from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from visattn._checks import one_of
from visattn._types import Fusion
from visattn.errors import OptionError
from visattn.maps import AttentionMap
from visattn.methods._query import Query, weights_of
from visattn.methods._select import described, one_forward
from visattn.records import AttentionRecord, Recording


def attention(
    recording: Recording,
    *,
    layer: int | str | Literal["all"] = -1,
    head: int | Literal["all"] = "all",
    fusion: Fusion | None = None,
    query: Query = "auto",
    dtype: torch.dtype = torch.float32,
) -> AttentionMap:
    """Attention of a query over the patches: `sum_i query_i A[i, patch]`, nothing else done to it.

    Args:
        recording: Any recording with attention of tokens on a grid.
        layer: Position among the layers, dotted name, or `all`.
        head: One head or `all`.
        fusion: How heads are merged: `mean`, `max`, `min`; None keeps them apart.
        query: See `visattn.methods.QUERY_SPELLINGS`; `auto` is what the model itself reads out.
        dtype: float64 computes the softmax in double precision.

    Returns:
        Map with axes `batch`, `layer` (if `all`), `head` (unless fused or chosen); values in [0, 1], whose sum over the patches is 1
        less what went to prefix tokens (stated in the notes).

    Raises:
        OptionError: If a layer, head, fusion or query does not exist.

    Reference:
        Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021, arXiv:2104.14294 (last layer, class
        token, each head).
    """
    if fusion is not None:
        one_of(fusion, ("mean", "max", "min"), "fusion")
    records = _records(one_forward(recording), layer, query)
    rows, chosen = zip(*(_row(record, query, recording.readout, dtype) for record in records), strict=True)
    stacked = torch.stack(rows, dim=1)  # (B, layers, heads, K)
    labels = {"layer": tuple(record.layer for record in records)}
    axes = ["batch", "layer", "head"]
    heads = stacked.shape[2]
    if head != "all":
        if not -heads <= head < heads:
            raise OptionError(f"head must lie in [{-heads}, {heads - 1}], got {head}.")
        stacked = stacked[:, :, [head]]
    labels["head"] = tuple(str(i) for i in (range(heads) if head == "all" else [head % heads]))
    if fusion is not None:
        stacked = {"mean": stacked.mean(2), "max": stacked.amax(2), "min": stacked.amin(2)}[fusion]
    elif head != "all":
        stacked = stacked[:, :, 0]
    if fusion is not None or head != "all":
        axes.remove("head")
        del labels["head"]
    if layer != "all":
        stacked = stacked[:, 0]
        axes.remove("layer")
        del labels["layer"]
    layout = records[0].keys
    patches = stacked[..., len(layout.prefix) :]
    notes: tuple[str, ...] = ()
    if layout.prefix:
        share = 1 - float(patches.sum() / stacked.sum())
        notes = (f"{share:.0%} of the attention goes to the prefix tokens ({', '.join(layout.prefix)}) and is not drawn",)
    names = "all" if layer == "all" else records[0].layer
    provenance = described(recording, "attention", notes=notes, layer=names, head=head, fusion=fusion or "none", query=chosen[0])
    return AttentionMap(patches.reshape(*patches.shape[:-1], *layout.grid), tuple(axes), layout, labels, "attention", provenance)


def _records(recording: Recording, layer: int | str, query: Query) -> list[AttentionRecord]:
    spatial = [record for record in recording if record.keys.grid and record.kind != "channel"]
    if not spatial:
        raise OptionError("no attention over tokens on a grid was recorded. Use inspect to see what the model has.")
    pooling = [record for record in spatial if record.kind == "pool"]
    if pooling and layer == -1 and query == "auto":  # the model reads its image out there
        return pooling[-1:]
    chosen = replace(recording, records=[record for record in spatial if record.kind != "pool"] or spatial)
    if layer != "all":
        chosen = (
            chosen.select(layer=layer) if not isinstance(layer, str) else replace(recording, records=spatial).select(layer=layer)
        )
    return list(chosen)[:1] if layer != "all" else list(chosen)


def _row(record: AttentionRecord, query: Query, readout: str, dtype: torch.dtype) -> tuple[Tensor, str]:
    """`(B, heads, K)` attention of the weighted queries."""
    operator = record.operator.to(dtype)
    weights, chosen = weights_of(query, record.queries, readout, operator.device)
    used = weights.flatten(0, 2).any(0).nonzero().flatten()
    if len(used) > 8:  # many queries: a product over all rows
        return (weights.to(dtype) @ operator)[:, :, 0].float(), chosen
    rows = operator.rows(used)  # (B, heads, used, K)
    return (weights[..., used].to(dtype) @ rows)[:, :, 0].float(), chosen
