from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from visattn._checks import between, one_of
from visattn._types import Fusion, Sinks
from visattn.errors import OptionError
from visattn.maps import AttentionMap
from visattn.methods import diagnostics
from visattn.methods._query import Query, weights_of
from visattn.methods._select import chain, described
from visattn.operators import Operator
from visattn.provenance import Sink
from visattn.records import AttentionRecord, Recording, TokenLayout


def rollout(
    recording: Recording,
    *,
    fusion: Fusion = "mean",
    residual: float = 0.5,
    start_layer: int = 0,
    sinks: Sinks = "keep",
    query: Query = "auto",
    implementation: Literal["tiles", "reversed"] = "tiles",
    dtype: torch.dtype = torch.float32,
) -> AttentionMap:
    r"""Attention rollout: how much of each patch reaches the query through all layers, if attention were all that mixes.

    Heads are fused to one row-stochastic matrix `A` a layer and mixed with the residual path, `M = residual * I + (1 - residual) *
    A`; the map is `query^T M_L ... M_start`, computed from the last layer down as a row vector, so no matrix is ever built.

    Args:
        recording: Self-attention of every layer over one token set.
        fusion: How heads are merged; `max` and `min` are divided by their row sums.
        residual: Weight of the residual path in [0, 1]; 0.5 is the paper's.
        start_layer: First layer that takes part.
        sinks: `keep`; `drop`: no token attends to a sink, rows are divided by what is left; `redistribute`: what a token gives to
            sinks goes to all other patches alike. A row that nothing is left of becomes the token itself.
        query: The token that is explained; `auto` is what the model itself reads out.
        implementation: How `r @ A` is computed under `mean` and `keep`; see `visattn.operators.Operator.pull`.
        dtype: float64 computes in double precision.

    Returns:
        Map with the axis `batch`; non-negative; the sum over the patches is 1 less what reaches prefix tokens. Sinks are in the
        provenance.

    Raises:
        OptionError: If an option is out of range, or the layers do not share one token set.

    Reference:
        Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, arXiv:2005.00928. Differs from the paper: the row
        of one query instead of the matrix, and the treatment of sinks, which is off by default.
    """
    one_of(fusion, ("mean", "max", "min"), "fusion")
    one_of(sinks, ("keep", "drop", "redistribute"), "sinks")
    one_of(implementation, ("tiles", "reversed"), "implementation")
    between(residual, 0, 1, "residual")
    records = chain(recording)
    if not 0 <= start_layer < len(records):
        raise OptionError(f"start_layer must lie in [0, {len(records) - 1}], got {start_layer}.")
    if implementation == "reversed" and (fusion != "mean" or sinks != "keep"):
        raise OptionError("implementation='reversed' computes fusion='mean' with sinks='keep' only. Use implementation='tiles'.")
    layout = records[0].keys
    weights, chosen = weights_of(query, layout, recording.readout, records[0].operator.device)
    r = weights.to(dtype).expand(records[0].operator.shape[0], 1, 1, -1)
    if fusion == "mean" and sinks == "keep":
        r, found = _mean(records, start_layer, r, residual, implementation, dtype)
    else:
        found = diagnostics.sinks(recording)
        for record in reversed(records[start_layer:]):
            step = _fused_step(record.operator.to(dtype), r[:, :, 0], fusion, sinks, found, layout)
            r = residual * r + (1 - residual) * step[:, :, None]
    patches = r[:, 0, 0, len(layout.prefix) :].float()
    provenance = described(
        recording,
        "rollout",
        fusion=fusion,
        residual=residual,
        start_layer=start_layer,
        sinks=sinks,
        query=chosen,
    ).but(sinks=found)
    return AttentionMap(patches.reshape(-1, *layout.grid), ("batch",), layout, {}, "rollout", provenance)


def _mean(
    records: Sequence[AttentionRecord],
    start: int,
    r: Tensor,
    residual: float,
    implementation: Literal["tiles", "reversed"],
    dtype: torch.dtype,
) -> tuple[Tensor, tuple[tuple[Sink, ...], ...]]:
    """The recursion with a second row beside `r`: uniform weights, whose product is the column score, for the price of one."""
    tokens = r.shape[-1]
    uniform = torch.full_like(r, 1 / tokens)
    scores = []
    for record in reversed(records):
        operator = record.operator.to(dtype)
        pulled = operator.pull(torch.cat([r, uniform], dim=2), implementation).mean(1, keepdim=True)
        scores.append(pulled[:, 0, 1] * tokens)
        if record in records[start:]:
            r = residual * r + (1 - residual) * pulled[:, :, :1]
    return r, diagnostics.from_scores(torch.stack(scores[::-1], dim=1), records)


def _fused_step(
    operator: Operator, r: Tensor, fusion: Fusion, sinks: Sinks, found: Sequence[Sequence[Sink]], layout: TokenLayout
) -> Tensor:
    """`(B, 1, K)`: `r @ A` with heads fused row by row, sinks treated, rows summing to 1."""
    batch, _, _, tokens = operator.shape
    sunk = torch.zeros(batch, tokens, dtype=torch.bool, device=operator.device)
    for image, entries in enumerate(found if sinks != "keep" else ()):
        for sink in entries:
            sunk[image, layout.patch(sink.row, sink.column)] = True
    open_patches = ~sunk
    open_patches[:, : len(layout.prefix)] = False
    out = torch.zeros(batch, 1, tokens, dtype=operator.dtype, device=operator.device)
    for tile in operator.tiles():
        rows = {"mean": tile.weights.mean(1), "max": tile.weights.amax(1), "min": tile.weights.amin(1)}[fusion]  # (B, rows, K)
        if sinks != "keep":
            here = sunk[:, None, tile.keys]
            lost = (rows * here).sum(-1, keepdim=True)
            rows = rows.masked_fill(here, 0)
            if sinks == "redistribute":
                rows = rows + lost * open_patches[:, None, tile.keys] / open_patches.sum(-1)[:, None, None]
        total = rows.sum(-1, keepdim=True)
        rows = rows / total.clamp_min(torch.finfo(rows.dtype).tiny)
        out.index_add_(2, tile.keys, r[..., tile.queries] @ rows)
        out[..., tile.queries] += r[..., tile.queries] * (total == 0).mT  # a token that has nobody left to attend to keeps itself
    return out
