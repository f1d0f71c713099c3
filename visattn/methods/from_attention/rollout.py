"""Attention rollout: attention with its residual path, multiplied over the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from visattn._support.checks import between, one_of
from visattn._support.types import DiscardOver, Fusion, Implementation, Sinks
from visattn.errors import OptionError
from visattn.maps import AttentionMap, MapFacts
from visattn.methods.from_attention import recursion
from visattn.methods.from_attention.norm import mixing_ratio, norm_rows
from visattn.methods.method import Need, attention_method, needs
from visattn.methods.queries import Query
from visattn.methods.result import to_map
from visattn.methods.selection import chain, chain_refusal
from visattn.methods.sinks import find_sinks, sinks_of_scores
from visattn.provenance import Sink
from visattn.records import AttentionRecord, Recording

WeightsBy = Literal["attention", "norm"]


def rollout(
    recording: Recording,
    *,
    fusion: Fusion = "mean",
    weights_by: WeightsBy = "attention",
    residual: float | Literal["measured"] = 0.5,
    discard: float = 0.0,
    discard_over: DiscardOver = "row",
    start_layer: int = 0,
    sinks: Sinks = "keep",
    query: Query = "auto",
    implementation: Implementation = "tiles",
    dtype: torch.dtype = torch.float32,
) -> AttentionMap:
    r"""Attention rollout: how much of each patch reaches the query through all layers, if attention were all that mixes.

    Heads are fused to one row-stochastic matrix `A` a layer and mixed with the residual path, `M = residual * I + (1 - residual) *
    A`; the map is `query^T M_L ... M_start`, computed from the last layer down as a row vector, so no matrix is ever built.

    Args:
        recording: Self-attention of every layer over one token set.
        fusion: How heads are merged; `max` and `min` are divided by their row sums.
        weights_by: What counts as weight: `attention`, or the `norm` of what a token gives. Then `A_ij` becomes
            `||sum_h A_ij v_j W_O||`, and rows are divided by their sums last, after discarding. That and `measured` need values:
            `capture(model, values=True)`.
        residual: Weight of the residual path, from 0 to 1, or `measured`. 0.5 is the paper's; measured, each token keeps the share
            that its own vector has of what attention and residual path give it, and takes the rest from the others by the weights
            that were not discarded.
        discard: Share of the smallest weights of patches, in [0, 1), that become 0 before rows are divided by their sums.
        discard_over: Smallest of each `row`, or of the whole `layer`. Prefix tokens are never discarded.
        start_layer: First layer that takes part.
        sinks: What becomes of attention that sinks get: `keep`, `drop`, `redistribute`. Dropped: no token attends to a sink, rows are
            divided by what is left; redistributed: what a token gives to sinks goes to all other patches alike. A row that nothing is
            left of becomes the token itself.
        query: The token that is explained; `auto` is what the model itself reads out, also by attention pooling.
        implementation: How `r @ A` is computed where rows stay as they are; see `visattn.operators.Operator.pull`.
        dtype: float64 computes in double precision.

    Returns:
        Map with the axis `batch`; non-negative; the sum over the patches is 1 less what reaches prefix tokens. Sinks are in the
        provenance.

    Raises:
        OptionError: If an option is out of range, or the layers do not share one token set.

    Reference:
        Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, arXiv:2005.00928. Differs from the paper: the row
        of one query instead of the matrix; discarding (Gildenblat's, there over all tokens of a layer), norms and measured mixing
        (Kobayashi et al., arXiv:2004.10102, arXiv:2109.07152) and the treatment of sinks, which are off by default.
    """
    one_of(fusion, get_args(Fusion), "fusion")
    one_of(weights_by, get_args(WeightsBy), "weights_by")
    one_of(discard_over, get_args(DiscardOver), "discard_over")
    one_of(sinks, get_args(Sinks), "sinks")
    one_of(implementation, get_args(Implementation), "implementation")
    if residual != "measured":
        between(residual, 0, 1, "residual")
    if between(discard, 0, 1, "discard") == 1:
        raise OptionError("discard must be less than 1, got 1: nothing would be left. Choose for example 0.9.")
    if weights_by == "norm" and fusion != "mean":
        raise OptionError(
            f"weights_by='norm' adds the vectors of all heads, so fusion='{fusion}' has no place. Leave fusion out."
        )
    records = chain(recording)
    recursion.check_start(start_layer, len(records))
    plain = fusion == "mean" and weights_by == "attention" and not discard and sinks == "keep" and residual != "measured"
    if implementation == "reversed" and not plain:
        raise OptionError(
            "implementation='reversed' computes fusion='mean' with sinks='keep' only, nothing discarded or measured. Use 'tiles'."
        )
    layout = records[0].keys
    r, chosen = recursion.beginning(recording, records, query, recursion.fused("mean"), dtype)
    if plain:
        r, found = _mean(records, start_layer, r, float(residual), implementation, dtype)
    else:
        found = find_sinks(recording)
        for record in reversed(records[start_layer:]):
            operator = record.operator.to(dtype)
            rows = recursion.fused(fusion) if weights_by == "attention" else norm_rows(record, dtype)
            if discard:
                rows = recursion.discarding(rows, operator, layout, discard, discard_over)
            if residual == "measured":
                rows = recursion.others(rows)
            if sinks != "keep":
                rows = recursion.without_sinks(rows, found, layout, sinks, operator)
            keep = 1 - mixing_ratio(record, dtype) if residual == "measured" else float(residual)
            r = recursion.step(operator, r, rows, recursion.mixed(keep))
    return to_map(
        recording,
        "rollout",
        "rollout",
        r[:, 0],
        layout,
        {
            "fusion": fusion,
            "weights_by": weights_by,
            "residual": residual,
            "discard": discard,
            "discard_over": discard_over,
            "start_layer": start_layer,
            "sinks": sinks,
            "query": chosen,
        },
        facts=MapFacts(sinks=found, sinks_kept=sinks == "keep"),
    )


def _mean(
    records: Sequence[AttentionRecord],
    start: int,
    r: Tensor,
    residual: float,
    implementation: Implementation,
    dtype: torch.dtype,
) -> tuple[Tensor, tuple[tuple[Sink, ...], ...]]:
    """The recursion with a second row beside `r`: uniform weights, whose product is the column score, for the price of one."""
    uniform = torch.full_like(r, 1 / r.shape[-1])
    scores = []
    for record in reversed(records):
        pulled = record.operator.to(dtype).pull(torch.stack([r, uniform], dim=2), implementation).mean(1)
        scores.append(pulled[:, 1] * r.shape[-1])
        if record in records[start:]:
            r = residual * r + (1 - residual) * pulled[:, :1]
    return r, sinks_of_scores(torch.stack(scores[::-1], dim=1), records)


def _values(parameters: Mapping[str, Any]) -> frozenset[Need]:
    """Norms are of values."""
    asked = parameters.get("weights_by") == "norm" or parameters.get("residual") == "measured"
    return needs("values") if asked else needs()


METHODS = {
    "rollout": attention_method(rollout, chain_refusal, sinks=True, more=_values),
}
