"""Attention rollout: attention with residual connections, multiplied over the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from visattn._support.checks import between, one_of
from visattn._support.language import option
from visattn._support.modes import in_own_modes
from visattn._support.types import DiscardOver, Fusion, Implementation, Sinks
from visattn.core.maps import AttentionMap, MapFacts
from visattn.core.methods.from_attention import recursion
from visattn.core.methods.from_attention.norm import mixing_ratio, norm_rows
from visattn.core.methods.method import Need, attention_method, needs
from visattn.core.methods.queries import Query
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import chain, chain_refusal
from visattn.core.methods.sinks import find_sinks, sinks_of_scores
from visattn.core.provenance import Sink
from visattn.core.records import AttentionRecord, Recording
from visattn.errors import OptionError

WeightsBy = Literal["attention", "norm"]


@in_own_modes
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
    r"""Compute attention rollout: the information flow from each patch to the query across layers, if only attention mixes tokens.

    The heads of each layer are fused into a row-stochastic matrix `A` and combined with the residual connection as
    `M = residual * I + (1 - residual) * A`. The map is `query^T M_L ... M_start`, computed as a row vector from the last layer down,
    without building a matrix.

    Args:
        recording: Self-attention of every layer over one token set.
        fusion: Fusion of heads: `mean`, `max` or `min`. Rows are renormalized after `max` and `min`.
        weights_by: Weights of the rollout: `attention`, or the `norm` of the weighted value vectors. With `norm`, `A_ij` becomes
            `||sum_h A_ij v_j W_O||`, and rows are normalized last, after discarding. `norm` and `residual="measured"` need values:
            `capture(model, values=True)`.
        residual: Weight of the residual connection, from 0 to 1, or `measured`. The paper uses 0.5. With `measured`, it is each token's
            own share of the norm of attention output plus residual. The rest comes from the other tokens, by the weights that were not
            discarded.
        discard: Share of the smallest patch weights that are set to 0 before rows are normalized, in [0, 1).
        discard_over: Scope of discarding: the smallest of each `row` or of the whole `layer`. Prefix tokens are never discarded.
        start_layer: First layer to include.
        sinks: Treatment of attention to sinks: `keep`, `drop` or `redistribute`. `drop` removes it and renormalizes rows;
            `redistribute` spreads it evenly over all other patches. If nothing remains of a row, the token attends only to itself.
        query: Query token to explain; `auto` is what the model reads, or its attention pooling.
        implementation: Implementation of the products `r @ A`: `tiles` or `reversed`; see `visattn.operators.Operator.pull`.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`; non-negative. The sum over the patches is 1 minus the share of prefix tokens. The provenance lists
        sinks.

    Raises:
        OptionError: If an option is out of range, or the layers do not share one token set.

    Reference:
        Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, arXiv:2005.00928. Differs: computes the
        row of one query instead of the matrix. Optional and off by default are discarding (Gildenblat, there over all tokens of a
        layer), norms and measured mixing (Kobayashi et al., arXiv:2004.10102, arXiv:2109.07152), and the treatment of sinks.
    """
    one_of(fusion, get_args(Fusion), "fusion")
    one_of(weights_by, get_args(WeightsBy), "weights_by")
    one_of(discard_over, get_args(DiscardOver), "discard_over")
    one_of(sinks, get_args(Sinks), "sinks")
    one_of(implementation, get_args(Implementation), "implementation")
    if residual != "measured":
        between(residual, 0, 1, "residual")
    if between(discard, 0, 1, "discard") == 1:
        raise OptionError("discard must be less than 1, got 1, which would leave nothing. Use for example 0.9.")
    if weights_by == "norm" and fusion != "mean":
        raise OptionError(
            f"{option('weights_by', 'norm')} adds the vectors of all heads, so {option('fusion', fusion)} does not apply. Leave it out."
        )
    records = chain(recording)
    recursion.check_start(start_layer, len(records))
    plain = fusion == "mean" and weights_by == "attention" and not discard and sinks == "keep" and residual != "measured"
    if implementation == "reversed" and not plain:
        raise OptionError(
            f"{option('implementation', 'reversed')} supports only {option('fusion', 'mean')} and {option('sinks', 'keep')}, without "
            "discarding or measuring. Use 'tiles'."
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
    """Run the recursion for `r` and find sinks in the same pass, with uniform weights as a second row."""
    uniform = torch.full_like(r, 1 / r.shape[-1])
    scores = []
    for record in reversed(records):
        pulled = record.operator.to(dtype).pull(torch.stack([r, uniform], dim=2), implementation).mean(1)
        scores.append(pulled[:, 1] * r.shape[-1])
        if record in records[start:]:
            r = residual * r + (1 - residual) * pulled[:, :1]
    return r, sinks_of_scores(torch.stack(scores[::-1], dim=1), records)


def _values(parameters: Mapping[str, Any]) -> frozenset[Need]:
    """Return the need for values if the parameters use norms."""
    asked = parameters.get("weights_by") == "norm" or parameters.get("residual") == "measured"
    return needs("values") if asked else needs()


METHODS = {
    "rollout": attention_method(rollout, chain_refusal, sinks=True, more=_values),
}
